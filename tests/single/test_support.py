"""The tools of the tests: forked commands, the queue of tests, and groups of workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from commands import LOCKSTEP, own_environment, run, started, write_shims
from one_queue import pytest_xdist_make_scheduler
from worker_group import on_workers, run_in_workers

from lockstep.world.peer_loss import Lifeline
from lockstep.world.world import World

MAX_COLD = 282
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


def test_few_tests_really_start_python(request: pytest.FixtureRequest) -> None:
    """What is about the start itself, or needs hosts: each costs up to 10 s of a core."""
    cold = [item for item in request.session.items if item.get_closest_marker("cold")]
    assert len(cold) <= MAX_COLD, "have tests/support/commands.py run what does not have to be started really"


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


ROOT = Path(__file__).parents[2]
TESTS = [f"tests/single/test_support.py::test_{number}" for number in range(12)]


class _Node(SimpleNamespace):
    """A process that runs nothing."""

    __hash__ = object.__hash__
    shutting_down = False

    def __init__(self) -> None:
        super().__init__(gateway=SimpleNamespace(id="gw"), got=[])

    def send_runtest_some(self, indices: list[int]) -> None:
        self.got += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_queue_goes_on_when_two_processes_crash_at_once() -> None:
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(rootpath=ROOT, getvalue=lambda name: ["popen", "popen"], option=option)
    queue = pytest_xdist_make_scheduler(config, SimpleNamespace(loadscopesched=lambda *text: None))
    first: list[Any] = [_Node(), _Node()]
    for node in first:
        queue.add_node(node)
        queue.add_node_collection(node, TESTS)
    queue.schedule()
    assert all(node.got for node in first)
    crashed = [queue.remove_node(node) for node in first]
    assert crashed == [TESTS[node.got[0]] for node in first]

    successors: list[Any] = [_Node(), _Node()]
    for node in successors:
        queue.add_node(node)
    queue.add_node_collection(successors[1], TESTS)  # the other one is still collecting
    queue.schedule()
    assert successors[1].got
    assert not successors[0].got

    queue.add_node_collection(successors[0], TESTS)
    queue.schedule()
    assert successors[0].got
    assert not {TESTS[number] for node in successors for number in node.got} & {*crashed}


def _leave_a_thread(_: World) -> None:
    threading.Thread(target=threading.Event().wait, name="lockstep-test", daemon=True).start()


def _leave_a_handler(_: World) -> None:
    signal.signal(signal.SIGUSR1, Lifeline.__init__)


@pytest.mark.parametrize(
    ("work", "what"), [(_leave_a_thread, "the thread lockstep-test"), (_leave_a_handler, "a handler of .*SIGUSR1")]
)
def test_it_is_named(work: Callable[[World], None], what: str) -> None:
    with pytest.raises(AssertionError, match=f"{work.__name__} leaves behind: {what}"):
        run_in_workers(1, work, settle_seconds=0.01)


@on_workers(2)
def _fails_on_one(world: World) -> None:
    assert world.rank == 0


@on_workers(2)
def _differs(world: World) -> int:
    return world.rank


@pytest.mark.parametrize(
    ("test", "message"), [(_fails_on_one, r"^worker 1:\n(.*\n)*.*assert 1 == 0"), (_differs, None)]
)
def test_failing_or_differing_worker_fails_the_test(test: Callable[[], None], message: str | None) -> None:
    with pytest.raises(AssertionError, match=message) as error:
        test()
    assert "worker 0" not in str(error.value)
