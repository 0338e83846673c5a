"""`lockstep train` under real signals: exit code 75 and a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import LOCKSTEP, TORCHRUN, started
from time_limits import wait_for_ends

from lockstep.files.jsonl import read_records

# A small model whose step 30 lasts until a file tells it to go on: a signal before that comes while the job trains.
WAITING = """
import time
from pathlib import Path
from torch import nn
from lockstep.models.zoo_small import digits_net

class Waiting(nn.Identity):
    steps = 0

    def forward(self, images):
        self.steps += self.training
        if self.steps == 30 and not Path("go").exists():
            print("step 30 waits", flush=True)
            while not Path("go").exists():
                time.sleep(0.01)
        return images

def net(num_classes):
    return nn.Sequential(Waiting(), digits_net(num_classes, width=8))
"""
# 96 steps for two workers, who may agree to stop as late as 32 steps after the signal.
DIGITS = ("train", "-np", "2", "--model", "waiting:net", "--epochs", "8", "-b", "64", "--run-dir", "run")
# torchrun would end the second worker as soon as the first has gone; here it cannot, and each leaves its exit code.
EACH_CODE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = subprocess.call([sys.executable, "-m", "lockstep", *sys.argv[1:]])
with open(f"code-{os.environ['RANK']}", "w") as file:
    file.write(str(code))
"""


def _check_stop(text: str, name: str, path: Path) -> None:
    found = re.search(rf"stopped by {name} after step ([\d,]+) of [\d,]+, with a checkpoint", text)
    assert found, text
    assert "Traceback" not in text
    newest = max((path / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{int(found[1].replace(',', '')):08d}"
    assert list(read_records(path / "metrics.jsonl"))[-1]["kind"] == "stop"


def test_launcher_reports_workers_stopped_by_the_time_limit(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        "import os, sys, time, warnings\n"
        "from lockstep.files.output import report_to_launcher\n"
        "from lockstep.world.batch_job import age_of, launch_age\n"
        "time.sleep(0.3)\n"
        "warnings.simplefilter('ignore')\n"  # of the fork, by newer Pythons
        "if child := os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "assert age_of(os.getpid()) + 0.2 < launch_age()\n"  # the job was started before
        "report_to_launcher('stopped by the time limit after step 7 of 9', False, 75, True)\n"
        "sys.exit(75)\n"
    )
    with started([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "worker.py"], tmp_path) as job:
        assert job.wait(60) == 75, job.text
    assert job.text.splitlines()[1:] == ["lockstep: stopped by the time limit after step 7 of 9"]


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time, torch\n"
        "from torch import nn\n"
        "class Slow(nn.Flatten):\n"
        "    def forward(self, images):\n"
        "        if torch.is_grad_enabled():\n"  # not in a trial before the training
        "            print('a step', flush=True)\n"
        "            time.sleep(60)\n"
        "        return super().forward(images)\n"
        "def net(num_classes): return nn.Sequential(Slow(), nn.Linear(64, num_classes))\n"
    )
    with started([*LOCKSTEP, "train", "--model", "slow:net", "--device", "cpu"], tmp_path) as job:
        job.wait_for("a step")
        job.send_signal(signal.SIGINT)
        job.wait_for("press Ctrl-C again to exit at once")
        job.send_signal(signal.SIGINT)
        assert job.wait(30) == 130, job.text
    assert not list((tmp_path / "runs").glob("*/checkpoints/*"))


def test_a_signal_to_one_worker_of_two_stops_both(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "each_code.py").write_text(EACH_CODE)
    with started([*TORCHRUN, "each_code.py", *DIGITS], tmp_path) as job:
        job.wait_for("step 30 waits")
        workers = [worker for worker in job.workers() if "lockstep" in worker.cmdline()]
        assert len(workers) == 2
        next(worker for worker in workers if worker.environ()["RANK"] == "1").send_signal(signal.SIGUSR1)
        (tmp_path / "go").touch()
        assert job.wait(60) == 0, job.text
    assert [(tmp_path / f"code-{each}").read_text() for each in (0, 1)] == ["75"] * 2, job.text
    logs = [log.read_text() for log in (tmp_path / "run/logs").iterdir()]
    assert len(logs) == 2
    for log in logs:
        _check_stop(log, "SIGUSR1", tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signal_to_the_group_leaves_loader_processes_running(
    tmp_path: Path, new_folder: Callable[..., Path], number: signal.Signals
) -> None:
    (tmp_path / "linear.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "torch.set_num_threads(2)\n"  # after that, torch starts a thread in each loader process
        "def net(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(768, num_classes))\n"
    )
    words = ("train", new_folder(train=60), "-j", "2", "--in-memory", "never", "-b", "4", "--image-size", "16")
    epochs = ("--epochs", "20000", "--device", "cpu", "--run-dir", "run")
    with started([*LOCKSTEP, *words, "--model", "linear:net", *epochs], tmp_path) as job:
        job.wait_for("epoch     2/20000")
        loaders = job.children()
        assert len(loaders) >= 4  # two for training, two for evaluation
        os.killpg(job.pid, number)
        assert job.wait(30) == 75, job.text
        wait_for_ends(loaders)
    _check_stop(job.text, number.name, tmp_path / "run")


FIT = """
import torch
from torch.utils.data import TensorDataset
from lockstep.train import fit

data = TensorDataset(torch.randn(64, 1, 8, 8), torch.arange(64) % 4)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
fit(net, data, data, epochs=100_000, batch_size=8, lr=0.01, run_dir="run", device="cpu", log_every=1)
"""


LATE = """
import os, signal, time
import torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def wait_for_nothing():
    print("ready", flush=True)
    while True:
        time.sleep(0.1)

wait_for_nothing()
"""


def test_workers_that_do_not_stop_are_shown_and_then_killed(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    with started(
        [*LOCKSTEP, "run", "-np", "2", "--stop-timeout", "1", "--", sys.executable, "late.py"], tmp_path
    ) as job:
        job.wait_until(lambda: job.text.count("ready") == 2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM, job.text
    assert "lockstep: ranks 0 and 1: in user code, at late.py:9 in wait_for_nothing" in job.text
    assert "the workers did not stop within --stop-timeout 1 s and were killed" in job.text


def test_a_stop_of_fit_in_a_script_is_one_line_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FIT)
    with started(
        [*LOCKSTEP, "run", "-np", "2", "--max-restarts", "2", "--", sys.executable, "script.py"], tmp_path
    ) as job:
        job.wait_for("epoch      2/100000")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    assert "Traceback" not in job.text
    assert "restart 1" not in job.text
    stopped = [line for line in job.text.splitlines() if line.startswith("lockstep: stopped by SIGTERM")]
    assert len(stopped) == 1, job.text


def test_a_stop_of_fit_without_a_launcher_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FIT)
    with started([sys.executable, "script.py"], tmp_path) as job:
        job.wait_for("epoch      2/100000")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75, job.text
    assert "Traceback" not in job.text
    assert job.text.count("lockstep: stopped by SIGTERM after step ") == 1


def test_a_script_can_catch_a_stop(tmp_path: Path) -> None:
    text = FIT.replace("\nfit(", "\nfrom lockstep.errors import StoppedError\ntry:\n    fit(")
    (tmp_path / "script.py").write_text(f"{text}except StoppedError as stop:\n    print('caught', stop.exit_code)\n")
    with started([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "script.py"], tmp_path) as job:
        job.wait_for("epoch      2/100000")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0, job.text
    assert job.text.count("caught 75") == 2
