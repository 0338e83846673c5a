"""Who of a host's workers has failed, and how the others are ended."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from time_limits import wait_until

from lockstep.launch.node.worker_watch import StayingWorkers, Worker, WorkerWatch
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import WorkerFailure
from lockstep.world import MemberState

PATIENCE_SECONDS = 60.0  # of a test that has failed
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1000; done"
OBEYS = "trap 'exit 5' TERM; echo ready; sleep 1000 & wait"
PLAIN = "echo ready; exec sleep 1000"


class Shells:
    """Real processes, each the leader of a session as workers are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def worker(self, text: str) -> Worker:
        """One that is up: it has printed its first line."""
        process = subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        assert process.stdout
        process.stdout.readline()
        rank = len(self.processes) - 1
        error_file = self.folder / f"error-{rank}.json"
        worker = Worker(rank, rank, {"HOROVOD_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)})
        worker.child = process
        return worker


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Shells]:
    shells = Shells(tmp_path)
    yield shells
    for process in shells.processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def watching(
    workers: list[Worker],
    work: Callable[[WorkerWatch], Awaitable[Any]],
    timings: Timings | None = None,
    staying: Callable[[asyncio.Event], StayingWorkers] = StayingWorkers,
) -> Any:
    """What the work returns, in a loop that hears of ended children as the node process's does."""

    async def body() -> Any:
        changed = asyncio.Event()
        changed.set()  # a worker may have ended before
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, changed.set)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await work(WorkerWatch(workers, staying(changed), changed, timings or Timings()))
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    return asyncio.run(body())


async def nothing() -> None:
    """For those that do not ask who was told."""


async def unexpected(late: Sequence[Worker], seconds: float, only_blocked: bool) -> Sequence[Worker]:
    """No worker is too late."""
    raise AssertionError(late)


def brief(failures: list[WorkerFailure]) -> list[tuple[int, int]]:
    return [(failure.rank, failure.code) for failure in failures]


def codes(workers: list[Worker]) -> list[int | None]:
    return [worker.code for worker in workers]


def test_workers_that_end_well_are_no_failure(shells: Shells) -> None:
    workers = [shells.worker("echo ready"), shells.worker("echo ready")]

    async def tell() -> None:
        raise AssertionError("none has failed")

    assert watching(workers, lambda watch: watch.wait(tell, unexpected)) == []
    assert codes(workers) == [0, 0]


def test_one_failure_ends_the_others_who_do_not_count(shells: Shells) -> None:
    workers = [shells.worker(text) for text in (OBEYS, PLAIN, "echo ready; exit 3")]
    told: list[list[int | None]] = []

    async def tell() -> None:
        told.append(codes(workers))

    failures = watching(workers, lambda watch: watch.wait(tell, unexpected))
    assert brief(failures) == [(2, 3)]
    assert failures[0].age >= 0
    assert codes(workers) == [5, -signal.SIGTERM, 3]
    assert told == [[None, None, 3]]  # other hosts hear of it before the rest ends here


def test_failures_that_belong_together_are_all_told(shells: Shells) -> None:
    """A worker brings another down and ends after it: both are known, and neither is ended here."""
    long = Timings(settle=PATIENCE_SECONDS, worker_end=61, host_end=62, job_end=63, caller_end=99, output=62)
    follows = f"echo ready; while [ ! -e {shells.folder}/go ]; do sleep 0.01; done; kill -KILL $$"
    workers = [shells.worker(follows), shells.worker("echo ready; exit 4")]

    async def go() -> None:
        (shells.folder / "go").touch()

    assert brief(watching(workers, lambda watch: watch.wait(go, unexpected), long)) == [(0, -signal.SIGKILL), (1, 4)]


def test_what_ends_later_than_a_failure_is_not_waited_for(shells: Shells) -> None:
    short = Timings(settle=0.01, worker_end=0.3)
    workers = [shells.worker("echo ready; exit 1"), shells.worker(STUBBORN)]
    assert brief(watching(workers, lambda watch: watch.wait(nothing, unexpected), short)) == [(0, 1)]
    assert codes(workers) == [1, -signal.SIGKILL]


class Staying(StayingWorkers):
    """Some workers stay."""

    def __init__(self, changed: asyncio.Event, states: dict[int, MemberState], leading: Sequence[int] = ()) -> None:
        super().__init__(changed)
        self.states, self.leading = states, leading

    def state(self, number: int) -> MemberState:
        return self.states.get(number, MemberState.ENDS)

    def must_lead(self, number: int) -> bool:
        return number in self.leading

    def passes_notices(self, number: int) -> bool:
        return number in self.states


@pytest.mark.parametrize(
    ("must_lead", "other_has_left", "asked"), [(False, False, [True]), (True, False, [False]), (True, True, [True])]
)
def test_a_worker_that_holds_the_gil_is_killed_early(
    shells: Shells, must_lead: bool, other_has_left: bool, asked: list[bool]
) -> None:
    """Unless the job's state may be lost with it: then it has the time of the others."""
    workers = [shells.worker("echo ready; exit 1"), shells.worker(STUBBORN), shells.worker(PLAIN)]
    limits = Timings(settle=0.01, blocked=0.02, worker_end=0.5, leave=PATIENCE_SECONDS if asked[0] else 0.6)
    calls = list[bool]()

    async def holding(late: Sequence[Worker], seconds: float, only_blocked: bool) -> Sequence[Worker]:
        calls.append(only_blocked)
        return late

    states = {1: MemberState.LEAVES} | ({2: MemberState.WAITS} if other_has_left else {})
    staying = functools.partial(Staying, states=states, leading=(1, 2) if must_lead else ())
    assert brief(watching(workers, lambda watch: watch.wait(nothing, holding), limits, staying)) == [(0, 1)]
    assert codes(workers) == [1, -signal.SIGKILL, None if other_has_left else -signal.SIGTERM]
    assert calls == asked


def test_worker_that_would_stay_too_late_ends_with_the_others(shells: Shells) -> None:
    """It was not told of the failure, and would wait for the lost worker until the limit for those that stay."""
    workers = [shells.worker("echo ready; exit 1"), shells.worker(PLAIN), shells.worker(PLAIN)]
    limits = Timings(settle=0.2, worker_end=0.5, leave=PATIENCE_SECONDS)

    states = {1: MemberState.LEAVES}

    async def introduce() -> None:
        states[2] = MemberState.STAYS

    async def kill_the_leaving_one(watch: WorkerWatch) -> list[WorkerFailure]:
        waiting = asyncio.create_task(watch.wait(introduce, unexpected))
        while workers[2].poll() is None:
            await asyncio.sleep(0.01)
        assert workers[1].poll() is None
        os.killpg(workers[1].child.pid, signal.SIGKILL)
        return await waiting

    staying = functools.partial(Staying, states=states)
    assert brief(watching(workers, kill_the_leaving_one, limits, staying)) == [(0, 1)]
    assert codes(workers) == [1, -signal.SIGKILL, -signal.SIGTERM]


def test_notice_goes_to_workers_that_can_handle_it(shells: Shells) -> None:
    workers = [shells.worker("trap 'exit 7' USR1; echo ready; sleep 1000 & wait"), shells.worker(PLAIN)]

    async def work(watch: WorkerWatch) -> None:
        watch.signal(signal.SIGUSR1)
        while workers[0].poll() is None:
            await asyncio.sleep(0.01)

    watching(workers, work, staying=functools.partial(Staying, states={0: MemberState.STAYS}))
    assert codes(workers) == [7, None]


def test_workers_that_are_ended_from_outside_have_not_failed(shells: Shells) -> None:
    workers = [shells.worker(OBEYS), shells.worker(PLAIN)]

    async def end(watch: WorkerWatch) -> list[WorkerFailure]:
        waiting = asyncio.create_task(watch.wait(nothing, unexpected))
        await asyncio.sleep(0)
        await watch.end(PATIENCE_SECONDS)
        assert watch.is_ended
        return await waiting

    assert watching(workers, end) == []
    assert codes(workers) == [5, -signal.SIGTERM]


def test_to_end_them_in_no_time_is_to_kill_them(shells: Shells) -> None:
    workers = [shells.worker(OBEYS), shells.worker(STUBBORN)]
    watching(workers, lambda watch: watch.end(0))
    assert codes(workers) == [-signal.SIGKILL] * 2


def test_what_a_worker_has_started_in_its_session_ends_with_it(shells: Shells) -> None:
    children = shells.folder / "child"
    worker = shells.worker(f"sleep 1000 & echo $! > {children}; echo ready; wait")
    watching([worker], lambda watch: watch.end(PATIENCE_SECONDS))
    child = int(children.read_text())
    wait_until(lambda: not _runs(child))  # SIGTERM reaches it when it reaches the worker


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_worker_is_ended_here_after_a_request_to_stop(shells: Shells) -> None:
    """Worker 1 dies of the request at once; worker 0 takes until the file is there, and ends well."""
    saves = (
        f"trap 'touch {shells.folder}/asked; while [ ! -e {shells.folder}/go ]; do sleep 0.01; done; exit 0' TERM; "
        "echo ready; sleep 1000 & wait"
    )
    workers = [shells.worker(saves), shells.worker(PLAIN)]
    told: list[list[int | None]] = []

    async def tell() -> None:
        told.append(codes(workers))

    async def stop(watch: WorkerWatch) -> list[WorkerFailure]:
        watch.signal(signal.SIGTERM)
        waiting = asyncio.create_task(watch.wait(tell, unexpected))
        while workers[1].code is None or not (shells.folder / "asked").exists():
            await asyncio.sleep(0.01)
        (shells.folder / "go").touch()
        return await waiting

    assert brief(watching(workers, stop)) == [(1, -signal.SIGTERM)]
    assert told == [[0, -signal.SIGTERM]]


def test_another_signal_does_not_request_a_stop(shells: Shells) -> None:
    texts = ("trap 'exit 6' USR1; echo ready; sleep 1000 & wait", f"trap '' USR1; {PLAIN}")
    workers = [shells.worker(text) for text in texts]

    async def notice(watch: WorkerWatch) -> list[WorkerFailure]:
        watch.signal(signal.SIGUSR1)
        return await watch.wait(nothing, unexpected)

    assert brief(watching(workers, notice)) == [(0, 6)]
    assert workers[1].code == -signal.SIGTERM


def test_a_failure_is_reported_as_the_worker_wrote_it(shells: Shells) -> None:
    worker = shells.worker("echo ready; exit 1")
    words = {"text": "error: no such data", "lost_peer": True, "final": True}
    since = time.monotonic() - 1000
    worker.error_file.write_text(json.dumps({"lockstep": {**words, "exit_code": 4, "monotonic_seconds": since}}))
    (failure,) = watching([worker], lambda watch: watch.wait(nothing, unexpected))
    assert 1000 <= failure.age < 2000
    assert failure == WorkerFailure(rank=0, code=4, age=failure.age, **words)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"message": "of torch"}', '{"lockstep": {"text": "half"}}', '{"lockstep": null}']
)
def test_a_foreign_error_file_does_not_hide_the_failure(shells: Shells, content: str) -> None:
    worker = shells.worker("echo ready; exit 9")
    worker.error_file.write_text(content)
    assert brief(watching([worker], lambda watch: watch.wait(nothing, unexpected))) == [(0, 9)]
