"""Steps that reach rank 0 through the job's store, and the thread that exchanges them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from time_limits import wait_until

from lockstep.diagnosis.group_watch import StoreWatch
from lockstep.diagnosis.observed_steps import PHASES, ObservedSteps
from lockstep.diagnosis.phases import WAITING
from lockstep.diagnosis.stragglers import COMPARE
from lockstep.observe.job_steps import JobSteps
from lockstep.observe.step_exchange import StepExchange

TIMEOUT_SECONDS = 30
WATCH = "lockstep-store-watch"


class Counted:
    """A check that counts its runs, and raises an error in one of them."""

    def __init__(self, fails_at: int = 0) -> None:
        self.runs = 0
        self.third = threading.Event()
        self._fails_at = fails_at

    def check(self, store: Any) -> None:
        self.runs += 1
        store.set("key", "value")
        if self.runs == self._fails_at:
            raise RuntimeError("the store is closed")
        if self.runs == 3:
            self.third.set()


def _store() -> Any:
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True))


def test_a_check_runs_until_close_and_then_finishes() -> None:
    counted, finished = Counted(), list[Any]()
    watch = StoreWatch(_store(), counted.check, 0.01, finished.append)
    assert counted.third.wait(TIMEOUT_SECONDS)
    assert not finished
    watch.close()
    wait_until(lambda: len(finished) == 1)


def test_the_thread_ends_when_the_store_is_closed() -> None:
    counted, finished, others = Counted(fails_at=2), list[Any](), {*threading.enumerate()}
    watch = StoreWatch(_store(), counted.check, 0.01, finished.append)
    wait_until(lambda: counted.runs == 2 and WATCH not in [thread.name for thread in {*threading.enumerate()} - others])
    assert (counted.runs, finished) == (2, [])
    watch.close()


class Worker:
    """One of several workers, whose steps are given."""

    def __init__(self, rank: int, size: int, forward: float, job: JobSteps) -> None:
        self.forward = forward
        self._published = ObservedSteps(9, report=1)  # of an earlier job
        own = (lambda: job) if rank == 0 else None
        self.exchange = StepExchange(rank, size, lambda: self._published, 10.0, own, keeps_records=True)

    def report(self) -> None:
        """Publish 50 more steps."""
        each = {"forward": self.forward, "backward": 0.02, "optimizer": 0.001, WAITING: 0.1}
        phases = tuple(each.get(phase, 0.0) for phase in PHASES)
        number = self._published.report + 1
        self._published = ObservedSteps(50 * number, report=number, report_steps=50, report_seconds=phases)


class Job:
    """Workers that share a store; rank 0 writes records."""

    def __init__(self, folder: Path, *forward: float) -> None:
        self.store = dist.HashStore()
        self.steps = JobSteps(("python", "train.py"), folder)
        self.workers = [Worker(rank, len(forward), each, self.steps) for rank, each in enumerate(forward)]

    def exchange(self, times: int, but: int | None = None) -> None:
        """Let all workers but one report so many times."""
        for _ in range(times):
            for rank, worker in enumerate(self.workers):
                if rank != but:
                    worker.report()
            for worker in reversed(self.workers):  # rank 0 compares at the end
                worker.exchange.check(self.store)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Job]:
    """A job whose rank 1 is slow."""
    job = Job(tmp_path / "steps", 0.01, 0.05, 0.01)
    yield job
    job.steps.close(0)


def test_the_slow_rank_is_named_once_after_three_reports(slow: Job, capsys: pytest.CaptureFixture[str]) -> None:
    slow.exchange(2)
    assert not capsys.readouterr().err
    slow.exchange(20)
    assert capsys.readouterr().err == (
        "lockstep: rank 1 slows all others down: 50 ms per step in the forward pass, "
        f"where the median of the others is 10 ms; {COMPARE}\n"
    )


def test_ranks_are_compared_only_when_each_has_a_new_report(slow: Job, capsys: pytest.CaptureFixture[str]) -> None:
    slow.exchange(2)
    slow.exchange(20, but=2)
    assert not capsys.readouterr().err
    slow.exchange(1)
    assert capsys.readouterr().err.count("rank 1 slows all others down") == 1


def test_nothing_begins_before_all_workers_take_steps(slow: Job, tmp_path: Path) -> None:
    slow.exchange(5, but=2)
    assert not slow.steps.is_recorded
    slow.exchange(1)
    assert slow.steps.is_recorded


@pytest.mark.parametrize("times", [1, 0])  # 0: of a job that is over before the first exchange
def test_rank_0_waits_for_the_last_steps_of_the_others(times: int, slow: Job) -> None:
    slow.exchange(times)
    for worker in slow.workers:
        worker.report()
    first, *others = slow.workers
    ends = [threading.Thread(target=worker.exchange.finish, args=[slow.store]) for worker in others]
    main = threading.Thread(target=first.exchange.finish, args=[slow.store])
    for thread in (main, *ends):
        thread.start()
    for thread in (main, *ends):
        thread.join(TIMEOUT_SECONDS)
    steps = 50 * (2 + times)
    assert {rank: each.steps for rank, each in slow.steps.by_rank().items()} == dict.fromkeys(range(3), steps)


def test_many_workers_send_less_often() -> None:
    exchanges = [StepExchange(1, size, ObservedSteps, 10.0, None) for size in (2, 100, 1000)]
    assert [each.interval_seconds for each in exchanges] == [1.0, 1.0, 10.0]
