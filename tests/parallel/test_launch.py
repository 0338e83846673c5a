"""`lockstep train` as users start it: several workers, torchrun, and what happens when one fails."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest
from commands import HOROVODRUN, LOCKSTEP, TORCHRUN, own_environment, run, started, write_shims
from time_limits import wait_for_ends

from lockstep.config.values import NOTICE
from lockstep.errors import StoppedError
from lockstep.files.jsonl import read_records
from lockstep.launch.controller.job_signals import FORWARDED
from lockstep.launch.protocol.reachability import proof

SECRET = "5ec2e7" * 5


@pytest.mark.cold
def test_only_workers_import_from_the_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mine.py").write_text("import sys; print('mine', sys.flags.safe_path)")
    words = ["run", "-np", "1", "--", sys.executable, "-c", "import mine"]
    done = run([sys.executable, "-P", "-m", "lockstep", *words], tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    assert "mine False" in done.stdout


@pytest.mark.parametrize(
    ("flags", "top1"), [(["--epochs", "2"], 0.85), pytest.param([], 0.985, marks=pytest.mark.long)]
)
def test_first_command_trains_the_digits_on_two_named_workers(flags: list[str], top1: float, tmp_path: Path) -> None:
    done = run([*LOCKSTEP, "train", "-np", "2", *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "worker 0 of 2: " in done.stdout
    assert "worker 1 of 2: " in done.stdout
    assert "1 thread each" in done.stdout
    (path,) = (tmp_path / "runs").iterdir()
    records = list(read_records(path / "metrics.jsonl"))
    assert records[-1]["top1"] >= top1
    assert records[-1]["samples"] == 360
    assert f"top-1 {100 * records[-1]['top1']:.2f} %" in done.stdout
    assert {log.name for log in (path / "logs").iterdir()} == {"worker-0.log", "worker-1.log"}
    assert json.loads((path / "environment.json").read_text())["workers"] == 2

    evaluated = run([*LOCKSTEP, "eval", path, "-np", "2"], tmp_path)
    assert f"top-1 {100 * max(r['top1'] for r in records if r.get('split') == 'val'):.2f} %" in evaluated.stdout


def test_workers_draw_progress_on_a_terminal(tmp_path: Path) -> None:
    write_shims(tmp_path / "shims", "lockstep")
    ours, theirs = pty.openpty()
    words = ["train", "-np", "2", "--epochs", "1", "--run-dir", "run"]
    colourful = {name: value for name, value in own_environment().items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    job = subprocess.Popen([tmp_path / "shims" / "lockstep", *words], cwd=tmp_path, env=colourful, stdout=theirs)
    os.close(theirs)
    shown = b""
    try:
        with suppress(OSError):  # the last one has closed it
            while text := os.read(ours, 1 << 16):
                shown += text
        assert job.wait(60) == 0
    finally:
        os.close(ours)
        job.kill()
    assert "━".encode() in shown, shown
    assert b"validation images right, over 2 workers" in shown, shown


@pytest.mark.cold
@pytest.mark.parametrize("command", [[sys.executable, "ask.py"], ["sh", "-c", "stty size; read name; echo got $name"]])
def test_only_worker_has_the_terminal(command: list[str], tmp_path: Path) -> None:  # forked, and started
    script = "import os\nprint(*reversed(os.get_terminal_size()))\nprint('got', input('name? '))"
    (tmp_path / "ask.py").write_text(script)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 111))
    words = [*LOCKSTEP, "run", "-np", "1", "--", *command]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    job = subprocess.Popen(words, cwd=tmp_path, env=own_environment(), start_new_session=True, **streams)
    os.close(theirs)
    os.write(ours, b"me\n")  # kept until it is read
    shown = b""
    try:
        with suppress(OSError):  # the last one has closed it
            while text := os.read(ours, 1 << 16):
                shown += text
        assert job.wait(60) == 0, shown
    finally:
        os.close(ours)
        job.kill()
    assert b"33 111" in shown, shown
    assert b"got me" in shown, shown
    assert not (tmp_path / "lockstep-logs").exists()


def test_an_error_of_all_workers_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("print(1")
    done = run([*LOCKSTEP, "run", "--json", "-np", "3", "--", sys.executable, "broken.py"], tmp_path)
    assert done.returncode == 1
    end = json.loads(done.stdout)
    assert (end["exit_code"], end["workers"], end["restarts"], end["hangs"]) == (1, 3, 0, [])
    assert (end["cause"]["kind"], end["cause"]["exit_code"], end["cause"]["signal"]) == ("worker", 1, "")
    assert "SyntaxError" in end["cause"]["text"]
    assert f"lockstep: {end['message']}\n" in done.stderr
    assert done.stderr.count("SyntaxError") == 1, done.stderr
    assert done.stderr.count('broken.py", line 1') == 1, done.stderr
    missing = run([*LOCKSTEP, "run", "-np", "3", "--", sys.executable, "missing.py"], tmp_path)
    assert missing.returncode == 2
    (line,) = missing.stderr.splitlines()
    assert line.startswith(f"lockstep run: error: missing.py: no such file in {tmp_path}; ")


def test_a_number_of_workers_that_contradicts_torchrun_is_named(tmp_path: Path) -> None:
    done = run([*TORCHRUN, "-m", "lockstep", "train", "--epochs", "1", "--run-dir", "run", "-np", "3"], tmp_path)
    assert done.returncode != 0
    assert "torchrun has started 2 workers; remove -np" in done.stderr


def test_older_launch_module_starts_it_with_its_extra_flag(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2", "-m", "lockstep"]
    done = run([*launch, "train", "--epochs", "1", "--run-dir", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "over 2 workers" in done.stdout


@pytest.mark.cold
def test_local_job_listens_on_loopback_only_and_hides_its_secret(tmp_path: Path) -> None:
    halves = f"'{SECRET[:9]}' + '{SECRET[9:]}'"  # the command line itself is looked through, too
    known = f"import secrets, lockstep.cli as c; secrets.token_hex = lambda *_: {halves}; raise SystemExit(c.main())"
    words = ("train", "-np", "2", "--epochs", "500", "--checkpoint-epochs", "0", "--run-dir", "run")
    with started([sys.executable, "-c", known, *words], tmp_path, cold=True) as job:
        job.wait_for("epoch   1/500")
        family = [job, *job.descendants()]
        assert len(job.workers()) == 2
        seen = [text for process in family for text in (*process.cmdline(), *process.environ().values())]
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not [text for text in seen if SECRET in text]
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]
        names = {process.environ()["TORCHELASTIC_RUN_ID"] for process in job.workers()}
        assert names == {proof(SECRET, "run").hex()[:16]}
        listening = [
            connection.laddr.ip
            for process in family
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_a_killed_worker_is_named_and_nothing_stays_behind(tmp_path: Path) -> None:
    with started([*LOCKSTEP, "train", "--json", "-np", "3", "--epochs", "500"], tmp_path) as job:
        job.wait_for("epoch   1/500")
        workers = job.workers()
        victim = next(worker for worker in workers if worker.environ()["RANK"] == "1")
        victim.send_signal(signal.SIGKILL)
        assert job.wait(timeout=30) == 128 + signal.SIGKILL
        wait_for_ends(workers)
    assert "worker 1 of 3 was ended by SIGKILL" in job.text
    (end,) = (json.loads(line) for line in job.text.splitlines() if line.startswith("{"))
    assert (end["exit_code"], end["cause"]["rank"], end["cause"]["signal"]) == (137, 1, "SIGKILL")


def test_ctrl_c_stops_all_workers_after_a_checkpoint_with_a_hint(tmp_path: Path) -> None:
    words = ["train", "-np", "2", "--epochs", "500", "--resume", "auto"]
    with started([*LOCKSTEP, *words], tmp_path) as job:
        job.wait_for("epoch   1/500")
        family = job.descendants()
        job.send_signal(signal.SIGINT)
        assert job.wait() == StoppedError.exit_code
        wait_for_ends(family)
    (run_folder,) = (tmp_path / "runs").iterdir()
    checkpoint = max(run_folder.glob("checkpoints/step-*"))
    assert list(read_records(run_folder / "metrics.jsonl"))[-1]["reason"] == "SIGINT"
    typed = shlex.join(["python", "-m", "lockstep", *words[:-2]])
    step = int(checkpoint.name.removeprefix("step-"))
    relative = run_folder.relative_to(tmp_path)
    assert job.text.splitlines()[-1] == (
        f"lockstep: stopped by SIGINT after step {step:,} of 11,500, with a checkpoint, "
        f"{checkpoint.relative_to(tmp_path)}; to resume: {typed} --run-dir {relative} --resume auto"
    )
    again = shlex.split(job.text.splitlines()[-1].partition("to resume: ")[2])
    done = run([sys.executable, *again[1:], "--max-steps", str(step + 1)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {step} " in done.stdout


STUCK = """
import signal, time
from pathlib import Path
from torch import nn
from lockstep.models.zoo_small import digits_net

class Stuck(nn.Identity):
    steps = 0

    def forward(self, images):
        self.steps += self.training
        while self.steps == 30:
            print("step 30 is stuck", flush=True)
            time.sleep(100)
        return images

def net(num_classes):
    return nn.Sequential(Stuck(), digits_net(num_classes, width=8))
"""


@pytest.mark.parametrize(
    ("signals", "checkpoint_steps", "step"),
    [((signal.SIGTERM,), "8", 24), ((signal.SIGINT, signal.SIGINT), "0", 23)],  # 23: the first epoch's end
)
def test_workers_that_do_not_stop_are_killed_and_named(
    tmp_path: Path, signals: tuple[signal.Signals, ...], checkpoint_steps: str, step: int
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    words = ["train", "-np", "2", "--model", "stuck:net", "--checkpoint-steps", checkpoint_steps, "--run-dir", "run"]
    checkpoint = f"run/checkpoints/step-{step:08d}"
    timeout = "1" if len(signals) == 1 else "60"
    with started([*LOCKSTEP, *words, "--epochs", "2", "--stop-timeout", timeout], tmp_path) as job:
        job.wait_until(lambda: job.text.count("step 30 is stuck") == 2 and (tmp_path / checkpoint).exists())
        for number in signals:
            job.send_signal(number)
            job.wait_for("stopping the workers")
        assert job.wait() == 128 + signals[0]
    stopped, left = job.text.splitlines()[-2:]
    killed = "within --stop-timeout 1 s and were killed" if len(signals) == 1 else "killed on the second Ctrl-C"
    assert stopped.startswith(f"lockstep: stopped by {signals[0].name}; ")
    assert killed in stopped
    assert left.startswith(f"lockstep: the newest checkpoint is from step {step}, {checkpoint}; to resume: ")
    assert left.endswith(f"--stop-timeout {timeout} --run-dir run --resume auto")


@pytest.mark.parametrize("checkpoint_steps", ["8", "0"])
def test_a_stop_while_the_job_waits_for_slots_names_what_is_left(tmp_path: Path, checkpoint_steps: str) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    hosts, calls = tmp_path / "hosts", tmp_path / "calls"
    hosts.write_text("localhost:2\n")
    script = f"cat {hosts} && echo >>{calls}"
    words = ["train", "-np", "2", "--model", "stuck:net", "--run-dir", "run", "--max-restarts", "3", "--epochs", "2"]
    words += ["--checkpoint-steps", checkpoint_steps, "--checkpoint-epochs", "0", "--host-discovery-script", script]
    with started([*LOCKSTEP, *words], tmp_path) as job:
        job.wait_until(lambda: job.text.count("step 30 is stuck") == 2)
        has_checkpoint = checkpoint_steps != "0"
        job.wait_until(lambda: not has_checkpoint or (tmp_path / "run/checkpoints/step-00000024").exists())
        hosts.write_text("localhost:1\n")
        seen = calls.stat().st_size + 2
        job.wait_until(lambda: calls.stat().st_size > seen)
        for worker in job.workers():  # one that stays stuck would have 120 s to leave its generation
            worker.kill()
        job.wait_for("waiting for hosts")
        job.send_signal(signal.SIGINT)
        assert job.wait() == (75 if has_checkpoint else 130), job.text
    last = job.text.splitlines()[-1]
    if has_checkpoint:
        assert last.startswith(
            "lockstep: stopped by SIGINT between two generations of the workers; the newest checkpoint is"
        )
        assert last.endswith(f"--host-discovery-script {shlex.quote(script)} --run-dir run --resume auto")
    else:
        assert last == "lockstep: no checkpoint was written, so there is nothing to resume"


def test_error_in_one_worker_is_printed_once_and_ends_the_job(tmp_path: Path, folder: Path) -> None:
    image = folder / "train" / "blue" / "007.png"
    image.write_bytes(image.read_bytes()[:60])
    words = ["-np", "2", "-a", "cifar-small", "-b", "4", "--in-memory", "never", "--image-size", "32"]
    done = run([*LOCKSTEP, "train", folder, *words], tmp_path)
    assert done.returncode == 4
    assert str(image) in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


def test_a_script_that_stops_by_itself_gets_the_time_for_it(tmp_path: Path) -> None:
    """Worker 1 dies of SIGTERM at once; worker 0 saves for longer than the grace after a failure."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(4); open('saved', 'w').close(); sys.exit(0)\n"
        "if os.environ['RANK'] == '0':\n    signal.signal(signal.SIGTERM, save)\n"
        "print('worker is up', flush=True)\ntime.sleep(100)\n"
    )
    with started([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, script], tmp_path) as job:
        job.wait_for("worker is up\nworker is up")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert "stopped by SIGTERM" in job.text


NOTED = """
import signal, sys, time
noted = set()
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, frame: noted.add(number))
print("worker is up", flush=True)
while len(noted) < len(sys.argv) - 1:
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    "command",
    [(*LOCKSTEP, "run", "-np", "2", "--"), (*HOROVODRUN, "-np", "2", "--min-np", "2")],
    ids=["run", "elastic"],
)
def test_signals_that_batch_systems_send_reach_all_workers(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(NOTED)
    with started([*command, sys.executable, "script.py", *map(int, FORWARDED)], tmp_path) as job:
        job.wait_until(lambda: job.text.count("worker is up") == 2)
        for number in FORWARDED:
            job.send_signal(number)
        assert job.wait(timeout=30) == 0, job.text


def test_a_signal_to_each_process_of_a_job_kills_none_of_them(tmp_path: Path) -> None:
    """As srun and `scancel` send it."""
    (tmp_path / "script.py").write_text(NOTED)
    with started([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "script.py", *map(int, NOTICE)], tmp_path) as job:
        job.wait_until(lambda: job.text.count("worker is up") == 2)
        node = job.workers()[0].parent()
        for process, number in product((job, *node.parents()[:1], node), NOTICE):
            process.send_signal(number)
        assert job.wait(timeout=30) == 0, job.text


ALONE = "import torch; print('trained')"
TOGETHER = (
    "import torch.distributed as dist\n"
    "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\nprint('trained')"
)


@pytest.mark.parametrize(
    ("code", "workers", "is_said"),
    [(ALONE, 2, True), (TOGETHER, 2, False)],
)
def test_workers_that_ran_one_script_each_by_itself_are_reported(
    tmp_path: Path, code: str, workers: int, is_said: bool
) -> None:
    done = run([*LOCKSTEP, "run", "-np", str(workers), "--", sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == workers
    assert (f"the {workers} workers did not work together" in done.stderr) == is_said
