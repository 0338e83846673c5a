"""`lockstep train` under real signals: exit code 75, a checkpoint, and a resume that ends as if none had come."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from runs import final_weights

from lockstep.records import read_records

LOCKSTEP = [sys.executable, "-m", "lockstep"]
DIGITS = ("train", "--epochs", "24", "-b", "32", "--device", "cpu", "--run-dir")
# torchrun would end the second worker as soon as the first has gone; here it cannot, and each leaves its exit code.
EACH_CODE = "trap '' TERM; \"$@\"; echo $? >code-$RANK; exit 0"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]


@contextmanager
def _started(*words: str, cwd: Path, command: list[str] = LOCKSTEP) -> Iterator[tuple[psutil.Popen, Path]]:
    """A job in a process group of its own while the block runs; its output is in a file."""
    output = cwd / "output.txt"
    environment = {**os.environ, "PYTHONPATH": f"{cwd}:{os.environ.get('PYTHONPATH', '')}"}
    with output.open("w") as file:
        job = psutil.Popen(
            [*command, *words], cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        family = [job]
        try:
            yield job, output
        finally:
            if job.is_running():
                family += job.children(recursive=True)
            for process in family:
                if process.is_running():
                    process.kill()
            psutil.wait_procs(family, timeout=20)


def _wait_for(text: str, output: Path, job: psutil.Popen) -> None:
    deadline = time.monotonic() + 100
    while text not in output.read_text():
        assert job.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def _run(*words: str, cwd: Path, command: list[str] = LOCKSTEP) -> str:
    done = subprocess.run([*command, *words], cwd=cwd, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _evaluations(run: Path) -> list[tuple[int, float, float, int]]:
    """What each epoch came to: bit for bit the same, or the test fails."""
    records = (record for record in read_records(run / "metrics.jsonl") if record["kind"] == "epoch")
    return [(record["step"], record["loss"], record["top1"], record["samples"]) for record in records]


def _check_stop(text: str, name: str, run: Path) -> None:
    found = re.search(rf"stopped by {name} after step ([\d,]+) of [\d,]+, with a checkpoint", text)
    assert found, text
    assert "Traceback" not in text
    newest = max((run / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{int(found[1].replace(',', '')):08d}"
    assert list(read_records(run / "metrics.jsonl"))[-1]["kind"] == "stop"


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that nothing stopped."""
    path = tmp_path_factory.mktemp("whole-of-two")
    _run(*LOCKSTEP, *DIGITS, "run", cwd=path, command=TORCHRUN)
    return path / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one worker that nothing stopped."""
    path = tmp_path_factory.mktemp("whole")
    _run(*DIGITS, "run", cwd=path)
    return path / "run"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_one_worker_stops_and_goes_on(tmp_path: Path, whole: Path, number: signal.Signals) -> None:
    with _started(*DIGITS, "run", cwd=tmp_path) as (job, output):
        _wait_for("epoch  2/24", output, job)
        job.send_signal(number)
        assert job.wait(timeout=30) == 75, output.read_text()
    _check_stop(output.read_text(), number.name, tmp_path / "run")
    _run(*DIGITS, "run", "--resume", "auto", cwd=tmp_path)
    assert _evaluations(tmp_path / "run") == _evaluations(whole)
    assert final_weights(tmp_path / "run") == final_weights(whole)


def test_the_launcher_says_that_the_time_limit_has_stopped_its_workers(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        "import sys\n"
        "import os\n"
        "from lockstep.cli.workers import _error_file, _write_error_file\n"
        "from lockstep.launch.job_end import age_of, launch_age\n"
        "assert launch_age() > age_of(os.getpid()) + 0.2\n"  # the agent was started in between
        "_write_error_file(_error_file(), 'stopped by the time limit after step 7 of 9', False, 75, True)\n"
        "sys.exit(75)\n"
    )
    with _started("run", "-np", "2", "--", sys.executable, "worker.py", cwd=tmp_path) as (job, output):
        assert job.wait(timeout=60) == 75, output.read_text()
    assert output.read_text().splitlines()[1:] == ["lockstep: stopped by the time limit after step 7 of 9"]


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from torch import nn\n"
        "class Slow(nn.Flatten):\n"
        "    def forward(self, images):\n"
        "        print('a step', flush=True)\n"
        "        time.sleep(60)\n"
        "        return super().forward(images)\n"
        "def net(num_classes): return nn.Sequential(Slow(), nn.Linear(64, num_classes))\n"
    )
    with _started("train", "--model", "slow:net", "--device", "cpu", cwd=tmp_path) as (job, output):
        _wait_for("a step", output, job)
        job.send_signal(signal.SIGINT)
        _wait_for("Ctrl-C again ends at once", output, job)
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=30) == 130, output.read_text()
    assert not list((tmp_path / "runs").glob("*/checkpoints/*"))


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "lockstep" in process.cmdline()[:3]
    return False


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_signal_to_one_worker_of_two_stops_both(tmp_path: Path, whole_of_two: Path, rank: str) -> None:
    words = (*LOCKSTEP, *DIGITS, "run")
    command = [*TORCHRUN, "sh", "-c", EACH_CODE, "sh"]
    with _started(*words, cwd=tmp_path, command=command) as (job, output):
        _wait_for("epoch  2/24", output, job)
        workers = [child for child in job.children(recursive=True) if _is_worker(child)]
        assert len(workers) == 2
        next(worker for worker in workers if worker.environ()["RANK"] == rank).send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 0, output.read_text()
    assert [(tmp_path / f"code-{each}").read_text() for each in (0, 1)] == ["75\n"] * 2, output.read_text()
    run = tmp_path / "run"
    for log in (run / "logs").iterdir():
        assert "stopped by SIGUSR1" in log.read_text()
    assert list(read_records(run / "metrics.jsonl"))[-1]["kind"] == "stop"
    _run(*words, "--resume", "auto", cwd=tmp_path, command=TORCHRUN)
    assert _evaluations(run) == _evaluations(whole_of_two)
    assert final_weights(run) == final_weights(whole_of_two)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_group_leaves_the_loader_processes_at_work(
    tmp_path: Path, new_folder: Callable[..., Path], number: signal.Signals
) -> None:
    words = ("train", str(new_folder(train=60)), "-j", "2", "--in-memory", "never", "-b", "4", "--image-size", "16")
    with _started(*words, "--epochs", "400", "--device", "cpu", "--run-dir", "run", cwd=tmp_path) as (job, output):
        _wait_for("epoch   2/400", output, job)
        loaders = job.children()
        assert len(loaders) >= 4  # two for training, two for evaluation
        os.killpg(job.pid, number)
        assert job.wait(timeout=30) == 75, output.read_text()
        assert psutil.wait_procs(loaders, timeout=5)[1] == []
    _check_stop(output.read_text(), number.name, tmp_path / "run")
