"""horovod.run: a function on several workers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from calls import in_a_program
from commands import run as run_command

from lockstep.launch.controller.run_function import run


def test_results_come_by_rank_and_the_caller_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factor = 10

    def place(offset: int, *, name: str) -> tuple[int, str]:
        print("working")
        return int(os.environ["HOROVOD_RANK"]) * factor + offset, name + os.environ["HOROVOD_SIZE"]

    def call() -> list[Any]:
        states = [(dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))]
        results = run(place, (1,), {"name": "of "}, num_proc=2)
        states.append((dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))
        assert states[0] == states[1]
        return results

    assert in_a_program(tmp_path, call) == [(1, "of 2"), (11, "of 2")]
    assert "[1]<stdout>:working" in capsys.readouterr().out


def test_it_works_without_a_script_file(tmp_path: Path) -> None:
    code = "from lockstep.launch.controller.run_function import run; print(run(lambda: 'from nowhere', num_proc=1))"
    done = run_command([sys.executable, "-c", code], tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "['from nowhere']"), done.stderr


def test_failing_worker_raises_with_its_rank_and_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("no such thing")
        signal.pause()

    with pytest.raises(
        RuntimeError,
        match=r"^Horovod detected that one or more processes exited with non-zero status.*"
        r"worker 1 failed:\nTraceback[^$]*KeyError: 'no such thing'",
    ):
        in_a_program(tmp_path, lambda: run(fail, num_proc=2))


def test_a_worker_without_a_result_does_not_shorten_the_list(tmp_path: Path) -> None:
    def leave() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            sys.exit(0)

    with pytest.raises(RuntimeError, match=r"only the workers \[0\] of 2 returned a result"):
        in_a_program(tmp_path, lambda: run(leave, num_proc=2))


def test_job_that_cannot_start_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="node7 is an unknown host name"):
        in_a_program(tmp_path, lambda: run(os.getpid, hosts="node7:1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": "a:1", "hostfile": "f"}, "hosts and hostfile"),
        ({"use_gloo": True, "use_mpi": True}, "use_gloo and use_mpi"),
        ({"hosts": "node7:1", "min_num_proc": 1}, "runs only on this machine"),
    ],
)
def test_arguments_that_exclude_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(os.getpid, **arguments)


@pytest.mark.parametrize("name", ["np", "min_np", "max_np", "network_interface"])
def test_older_names_are_deprecated(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} is deprecated"), pytest.raises(ValueError, match="hosts"):
        run(os.getpid, hosts="a", hostfile="b", **{name: 1})
