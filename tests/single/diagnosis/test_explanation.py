"""Who is responsible for a hang, by the states of all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.diagnosis.board import HVD, TORCH_GROUP, TRAINER
from lockstep.diagnosis.explanation import explain, ranks_text
from lockstep.diagnosis.flight_recorder import RecordedCollective
from lockstep.diagnosis.inspection import Frame, WorkerState

ALL_REDUCE = RecordedCollective("0", 9, "all_reduce", "float[10]", False)
BARRIER = RecordedCollective("0", 9, "barrier", "", False)
DONE = RecordedCollective("0", 8, "all_reduce", "float[10]", True)
MAIN = Frame("/home/me/train.py", 20, "<module>")
IN_TORCH = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 4181, "all_reduce", False)
WRAPPER = Frame("/x/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper", False)


def state(rank: int, *collectives: RecordedCollective, **facts: Any) -> WorkerState:
    values = {"pid": 100 + rank, "state": "S", "flags": TORCH_GROUP, "stack": (MAIN,), **facts}
    return WorkerState(rank, collectives=collectives, **values)


def waiting(rank: int) -> WorkerState:
    return state(rank, DONE, ALL_REDUCE)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([7, 0, 1, 2, 5], "ranks 0-2, 5 and 7"), ([1, 3], "ranks 1 and 3")],
)
def test_ranks_are_listed_as_ranges(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_the_rank_that_has_not_entered_is_named_with_its_line() -> None:
    bad = state(1, DONE, stack=(Frame("/home/me/dataset.py", 88, "load"), MAIN))
    found = explain([waiting(0), bad, waiting(2)], 312.4, lambda rank: "abc"[rank])
    assert found.culprits == (1,)
    assert found.lines == (
        "rank 1 (host b) has not entered all_reduce #9 of float[10]; ranks 0 and 2 have waited for it for 312 s",
        "rank 1 is in user code, at dataset.py:88 in load",
    )
    assert found.stacks == (
        "rank 1, process 101, most recent call first:",
        '  File "/home/me/dataset.py", line 88, in load',
        '  File "/home/me/train.py", line 20, in <module>',
    )


def test_a_programs_names_cannot_control_the_terminal() -> None:
    bad = state(1, DONE, stack=(Frame("/home/me/\x1b[2Jx\n.py", 88, "load\x07"),))
    other = state(0, RecordedCollective("0", 9, "all_reduce\x1b]0;title\x07", "", False))
    found = explain([other, bad], 300.0)
    assert not [line for line in (*found.lines, *found.stacks) if not line.isprintable()]
    assert "rank 1 is in user code, at \\x1b[2Jx\\n.py:88 in load\\x07" in found.lines


def test_of_ranks_that_wait_in_one_wrapper_the_callers_are_shown() -> None:
    wrapper = Frame("/home/me/metrics.py", 5, "metric_average")
    first = state(0, ALL_REDUCE, stack=(IN_TORCH, wrapper, Frame("/home/me/train.py", 30, "train"), MAIN))
    second = state(1, BARRIER, stack=(IN_TORCH, wrapper, Frame("/home/me/train.py", 44, "evaluate"), MAIN))
    lines = explain([first, second], 300.0).lines
    assert lines[1:3] == (
        "rank 0 in all_reduce #9 of float[10], at train.py:30 in train",
        "rank 1 in barrier #9, at train.py:44 in evaluate",
    )


def test_boards_name_the_waiting_workers_without_an_inspection() -> None:
    found = explain([state(0, pending=1, stack=()), state(1, stack=(), flags=TRAINER, phase="forward", step=7)], 300.0)
    assert found.culprits == (1,)
    assert found.lines == (
        "rank 1 has not entered a collective; rank 0 has waited for it for 300 s",
        "rank 1 is in forward",
    )


IN_LOADER = (Frame("/x/site-packages/torch/utils/data/dataloader.py", 5, "__next__", False), MAIN)
IN_LOCK = (Frame("/usr/lib/python3.11/threading.py", 331, "wait", False), MAIN)
IN_COMPILER = (Frame("/x/site-packages/torch/_inductor/compile_fx.py", 1, "compile", False), MAIN)


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        ({"stack": IN_LOADER}, "rank 1 is waiting for data, at train.py:20 in <module>"),
        ({"phase": "data_wait", "flags": TRAINER, "stack": ()}, "rank 1 is waiting for data"),
        ({"stack": IN_LOCK}, "rank 1 is waiting for a lock, at train.py:20 in <module>"),
        ({"stack": IN_COMPILER}, "rank 1 is compiling the model, at train.py:20 in <module>"),
        ({"phase": "evaluation", "flags": TRAINER}, "rank 1 is in evaluation, at train.py:20 in <module>"),
        ({"state": "T"}, "rank 1 is stopped (process 101); kill -CONT 101 continues it"),
        (
            {"state": "D", "stack": ()},
            "rank 1 is blocked in the kernel (process 101): a device or a file system does not",
        ),
        ({"has_answered": False}, "rank 1 is in native code that holds the GIL, or frozen, at train.py:20"),
        ({"state": ""}, "rank 1 is gone (process 101)"),
        ({"pid": 0, "exit_code": 0}, "rank 1 has exited with code 0: it finished before the other ranks"),
        ({"is_debugged": True}, "rank 1 is being debugged"),
    ],
)
def test_other_activity_is_reported(facts: dict[str, Any], doing: str) -> None:
    found = explain([waiting(0), state(1, DONE, **facts)], 10.0)
    assert found.culprits == (1,)
    assert found.lines[1].startswith(doing)


@pytest.mark.parametrize(
    ("line", "is_locked"),
    [
        ("lock.acquire()", True),
        ("if not self.guard.acquire(timeout=100):  # of the cache", True),
        ("with self._cache_lock:", True),
        ("lock.acquire(); work()", False),
        ("with open(path) as blocks:", False),
        ("acquire(images)", False),
    ],
)
def test_plain_lock_is_recognized_by_its_line(line: str, is_locked: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import threading\n{line}\n")
    bad = state(1, DONE, stack=(Frame(str(script), 2, "<module>"),))
    doing = "is waiting for a lock" if is_locked else "is in user code"
    assert explain([waiting(0), bad], 10.0).lines[1] == f"rank 1 {doing}, at train.py:2 in <module>"


def test_ranks_in_the_same_situation_share_a_line() -> None:
    loading = [state(rank, DONE, stack=IN_LOADER) for rank in (2, 3)]
    states = [waiting(0), state(1, DONE, state="T", pid=5), *loading]
    found = explain(states, 10.0)
    assert found.lines[0].startswith("ranks 1-3 have not entered all_reduce #9")
    assert found.lines[2] == "ranks 2 and 3 are waiting for data, at train.py:20 in <module>"


def test_different_collectives_name_the_minority() -> None:
    found = explain([waiting(0), state(1, DONE, BARRIER), waiting(2)], 10.0)
    assert found.culprits == (1,)
    at = ", at train.py:20 in <module>"
    assert found.lines[:3] == (
        "ranks have waited in different collectives for 10 s:",
        f"ranks 0 and 2 in all_reduce #9 of float[10]{at}",
        f"rank 1 in barrier #9{at}",
    )


def test_different_shapes_are_different_collectives() -> None:
    other = RecordedCollective("0", 9, "all_reduce", "float[7]", False)
    found = explain([waiting(0), state(1, other)], 10.0)
    assert found.culprits == (0, 1)
    assert "float[7]" in found.lines[2]


def test_all_in_the_same_collective_is_a_fault_of_the_network() -> None:
    found = explain([waiting(0), waiting(1)], 10.0)
    assert found.lines[0].startswith(
        "all ranks have been in all_reduce #9 of float[10] for 10 s: the network or a device"
    )


def test_stack_names_the_collective_without_records() -> None:
    found = explain([state(0, stack=(IN_TORCH, WRAPPER, MAIN)), state(1)], 10.0)
    assert found.culprits == (1,)
    assert found.lines[0] == "rank 1 has not entered all_reduce; rank 0 has waited for it for 10 s"


def test_phase_names_the_workers_that_wait_for_gradients() -> None:
    found = explain([state(0, flags=TRAINER, phase="reduction"), state(1, flags=TRAINER, phase="forward")], 10.0)
    assert found.culprits == (1,)
    assert "has not entered the reduction of the gradients" in found.lines[0]
    assert found.lines[1].startswith("rank 1 is in forward")


def test_hvds_operations_are_compared_by_name() -> None:
    def worker(rank: int, *operations: str) -> WorkerState:
        return state(rank, flags=HVD, operations=operations)

    missing = explain([worker(0, "allreduce.a", "allreduce.b"), worker(1, "allreduce.a")], 10.0)
    assert missing.culprits == (1,)
    assert "has not entered allreduce.b" in missing.lines[0]
    different = explain([worker(0, "allreduce.a"), worker(1, "allreduce.loss"), worker(2, "allreduce.a")], 10.0)
    assert different.culprits == (1,)
    assert different.lines[2].startswith("rank 1 in allreduce.loss")
    same = explain([worker(0, "allreduce.a"), worker(1, "allreduce.a")], 10.0)
    assert same.lines[0].startswith("all ranks have been in allreduce.a")


def test_a_stopped_rank_does_not_wait_although_it_has_entered() -> None:
    found = explain([waiting(0), state(1, DONE, ALL_REDUCE, state="T")], 10.0)
    assert found.culprits == (1,)


def test_if_no_rank_is_in_a_collective_all_are_described() -> None:
    found = explain([state(0, DONE, stack=IN_LOADER), state(1, DONE, stack=IN_LOADER)], 10.0)
    assert found.culprits == (0, 1)
    assert found.lines == (
        "no rank waits in a collective, and none has made progress for 10 s",
        "ranks 0 and 1 are waiting for data, at train.py:20 in <module>",
    )


def test_long_stacks_are_cut_and_launcher_frames_left_out() -> None:
    deep = tuple(Frame("/home/me/net.py", number, "forward") for number in range(20))
    own = (Frame("/x/src/lockstep/launch/forking/forked_worker.py", 5, "run", False), Frame("<string>", 1, "<module>"))
    found = explain([waiting(0), state(1, DONE, stack=(*deep, *own))], 10.0)
    assert len(found.stacks) == 14
    assert found.stacks[-1] == "  ... and 8 more"
