"""horovod.run: a function on several workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from lockstep.launch.function import run


def test_results_come_by_rank_and_the_caller_is_left_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    factor = 10

    def place(offset: int, *, name: str) -> tuple[int, str]:
        print("working")
        return int(os.environ["HOROVOD_RANK"]) * factor + offset, name + os.environ["HOROVOD_SIZE"]

    assert run(place, (1,), {"name": "of "}, num_proc=2) == [(1, "of 2"), (11, "of 2")]
    assert "[1]<stdout>:working" in capfd.readouterr().out
    assert before == (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_it_works_without_a_script_file() -> None:
    code = "from lockstep.launch.function import run; print(run(lambda: 'from nowhere', num_proc=1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['from nowhere']"


def test_a_failing_worker_is_an_error_with_its_rank_and_traceback() -> None:
    def fail() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("no such thing")
        signal.pause()

    with pytest.raises(RuntimeError, match=r"worker 1 failed:\nTraceback[^$]*KeyError: 'no such thing'"):
        run(fail, num_proc=2)


def test_a_killed_worker_is_an_error_too() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="worker 0 of 1 was ended by SIGKILL"):
        run(die)


def test_a_worker_without_a_result_does_not_shorten_the_list() -> None:
    def leave() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            sys.exit(0)

    with pytest.raises(RuntimeError, match=r"only the workers \[0\] of 2 left a result"):
        run(leave, num_proc=2)


def test_a_job_that_cannot_be_started_says_why() -> None:
    with pytest.raises(RuntimeError, match="node7 is no host that is known here"):
        run(os.getpid, hosts="node7:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, "hosts and hostfile"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi"),
        ({"hosts": "node7:1", "min_num_proc": 1}, "cannot travel to other hosts"),
    ],
)
def test_arguments_that_exclude_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(os.getpid, **arguments)


@pytest.mark.parametrize("name", ["np", "min_np", "max_np", "network_interface"])
def test_older_names_are_deprecated(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} is deprecated"), pytest.raises(ValueError, match="hosts"):
        run(os.getpid, hosts="a", hostfile="b", **{name: 1})
