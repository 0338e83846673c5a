"""That a command which the tests run without a start of Python does what it does when it is really started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, own_environment, run, started, write_shims

MOST_COLD = 320
SHOWN = """
import atexit, os, signal, subprocess, sys, tempfile, threading
child = [sys.executable, "-c", "import sys; print(sys.argv, open(0).read()); sys.exit(7)", "word"]
done = subprocess.run(child, input="given", stdout=subprocess.PIPE, text=True, cwd="/", env={**os.environ, "A": "B"})
atexit.register(print, "at exit")
folder = tempfile.TemporaryDirectory()
subprocess.run([sys.executable, "-c", "pass"], check=True)
print(done.returncode, done.stdout, sys.argv[1:], __name__, os.getcwd(), sys.stdin.read())
print(os.path.isdir(folder.name), threading.enumerate()[0].name, signal.getsignal(signal.SIGINT))
print(sys.path, sorted(os.environ), len(os.listdir("/proc/self/fd")))
print("torch" in sys.modules, [line for line in open("/proc/self/cmdline").read().split("\\0")][-3:], file=sys.stderr)
import torch, lockstep
print(torch.ones(2).sum(), torch.get_num_threads())
"""


@pytest.mark.parametrize(
    "words",
    [
        ("-c", SHOWN, "a word"),
        ("-c", "1 / 0"),
        ("-c", "raise SystemExit('a last word')"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("-c", "import atexit; atexit.register(print, 'at exit'); print('before'); raise KeyboardInterrupt"),
        ("-c", "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()"),
        ("-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'raise KeyboardInterrupt'], check=True)"),
        ("-c", "import subprocess, sys; subprocess.run([sys.executable], cwd='missing')"),
        ("missing.py",),
        ("-m", "lockstep", "train", "--no-such-flag"),
    ],
)
@pytest.mark.cold
def test_a_program_does_the_same(tmp_path: Path, words: tuple[str, ...]) -> None:
    environment = own_environment(PYTHONPATH=f"/tmp/one{os.pathsep}two")
    warm, cold = (run([sys.executable, *words], tmp_path, environment, cold=cold) for cold in (False, True))
    assert (warm.returncode, _told(warm.stdout), _told(warm.stderr)) == (
        cold.returncode,
        _told(cold.stdout),
        _told(cold.stderr),
    )


def _told(text: str) -> str:
    """What was printed, without the frames that lead to the program and without its addresses."""
    text = re.sub(r'  File "[^"]*(subprocess|forked_worker)\.py".*\n(    .*\n)*', "", text)
    return re.sub(r"0x[0-9a-f]+|\^+|~+", "", text)


@pytest.mark.cold
def test_workers_train_the_same(tmp_path: Path) -> None:
    words = (*LOCKSTEP, "train", "-np", "2", "--device", "cpu", "--epochs", "1", "--run-dir")
    for name in ("warm", "cold"):
        done = run([*words, name], tmp_path, cold=name == "cold")
        assert done.returncode == 0, done.stderr
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("warm", "cold")]
    assert weights[0] == weights[1]


def test_few_tests_really_start_python(request: pytest.FixtureRequest) -> None:
    """What is about the start itself, or needs hosts: each costs up to 10 s of a core."""
    cold = [item for item in request.session.items if item.get_closest_marker("cold")]
    assert len(cold) <= MOST_COLD, "have tests/support/commands.py run what does not have to be started really"


def test_signals_reach_it_and_its_end_is_known(tmp_path: Path) -> None:
    code = "import time\ntry:\n    print('ready', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: exit(9)"
    with started([sys.executable, "-c", code], tmp_path) as job:
        job.wait_for("ready")
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        assert job.wait(30) == 9
    with started([sys.executable, "-c", code], tmp_path) as job:
        job.wait_for("ready")
    assert job.poll() == -signal.SIGKILL
    assert not psutil.pid_exists(job.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", code], tmp_path, timeout=0.1)


@pytest.mark.cold
def test_a_shell_runs_it_by_its_name(tmp_path: Path) -> None:
    write_shims(tmp_path / "shims", "python", "lockstep")
    environment = own_environment(PATH=f"{tmp_path / 'shims'}:{own_environment()['PATH']}")
    text = "lockstep --version | tr a-z A-Z; python -c 'import sys; sys.exit(3)' || echo $?; python -I -c 'print(1)'"
    for killed in ("kill -TERM", "kill -KILL"):
        text += f"; python -c 'import time; time.sleep(60)' & sleep 0.5; {killed} $!; wait $! || echo $?"
    done = run(["bash", "-c", text], tmp_path, environment)
    version = run([*LOCKSTEP, "--version"], tmp_path).stdout
    assert done.stdout == f"{version.upper()}3\n1\n143\n137\n", done.stderr
