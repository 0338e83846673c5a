"""The driver of an elastic job on this machine: one worker a slot, replaced alone when it dies.

The workers ask for their places (see `lockstep.world.elastic_rendezvous`), and a new generation forms when all living
ones have. A worker that survives keeps its process and its order among the survivors, who come before the new ones:
rank 0, whose state the others take over, is a survivor. Rules as Horovod's, except that a failed worker's host, which
is the only one here, is not given up: its slot gets a new worker.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.launch.controller.discovery import Discovery
from lockstep.launch.controller.signals import ignore_stopping, on_stopping
from lockstep.launch.node.descendants import kill_descendants
from lockstep.launch.node.worker_starter import Child, WorkerStarter, signal_group, start
from lockstep.launch.output.display import OutputPlan, say
from lockstep.launch.output.local_output import LocalOutput, Stream
from lockstep.launch.plan.horovodrun_plan import ElasticPlan
from lockstep.launch.plan.hosts import names_of_this_machine, slots_here, slots_of
from lockstep.launch.plan.job_plan import handed_on
from lockstep.launch.plan.timings import Timings
from lockstep.world.elastic_rendezvous import ADDED, CHANGES, LIFE, REMOVED, answer_key, ask_key, worker_name
from lockstep.world.store import LOOPBACK, serve_store

POLL_SECONDS = 0.05
STARTS = 3  # workers of a slot that may end in a row without having met the others
FAILED = 1


class JobFailedError(Exception):
    """The job cannot go on; the message says why."""


class StopRequestedError(Exception):
    """A signal to the launcher."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


@dataclass(eq=False)
class SlotWorker:
    """A process on a slot. `after` is the generation it asks to leave, or None; `rank` counts in the present one."""

    slot: int
    name: str
    process: Child
    streams: tuple[Stream, Stream]
    after: int | None = None
    rank: int | None = None
    dismissed: bool = False

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the worker and the processes it has started."""
        signal_group(self.process, number)


def run_elastic(plan: ElasticPlan, output_plan: OutputPlan) -> int:
    """Carry out a plan and wait for its end.

    Returns:
        0 when workers have finished and none failed after that, 1 when the job failed, 128 + N after signal N.

    Raises:
        ConfigError: The discovery script fails at its first call.
    """
    on_stopping(_stop)
    discovery = None
    try:
        if plan.discovery_script:
            names = names_of_this_machine()
            discovery = Discovery(plan.discovery_script, plan.slots_per_host, partial(slots_here, names=names))
        with LocalOutput(output_plan) as output:
            driver = Driver(plan, output, lambda: slots_of(discovery.hosts) if discovery else plan.slots)
            try:
                driver.run()
            finally:
                ignore_stopping()
                driver.end()
    except JobFailedError as error:
        say(f"lockstep: {error}; all workers have ended")
        return FAILED
    except StopRequestedError as error:
        say(f"\nlockstep: stopped by {error.signal.name}; all workers have ended")
        return 128 + error.signal
    finally:
        if discovery:
            discovery.stop()
    return 0


def _stop(number: int, frame: Any) -> None:
    raise StopRequestedError(number)


def ranked(members: Iterable[SlotWorker], workers: Iterable[SlotWorker]) -> list[SlotWorker]:
    """The next generation by rank: who was a member, in that order, then the others by slot."""
    living = list(workers)
    old = [worker for worker in members if worker in living]
    return old + sorted((worker for worker in living if worker not in old), key=lambda worker: worker.slot)


def places(members: Sequence[SlotWorker]) -> list[dict[str, int]]:
    """Rank, local rank and size of each member; the members are in the order of ranks.

    The local rank is the slot and may exceed the size: a survivor keeps its GPU, and no new worker takes it.
    """
    return [{"rank": rank, "local_rank": member.slot, "size": len(members)} for rank, member in enumerate(members)]


def horovod_variables(rank: int, slots: Sequence[int]) -> dict[str, str]:
    """What a worker reads in its environment of its place at its start; hvd.init() tells it what has become of it.

    Args:
        slots: Those of the workers who are expected to meet, by rank.
    """
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(slots)),
        "HOROVOD_LOCAL_RANK": str(slots[rank]),
        "HOROVOD_LOCAL_SIZE": str(len(slots)),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }


class Driver:
    """The state of an elastic job, and the loop that moves it.

    Args:
        slots: How many slots this machine has at the moment.
    """

    def __init__(self, plan: ElasticPlan, output: LocalOutput, slots: Callable[[], int]) -> None:
        self._plan = plan
        self._output = output
        self._slots = slots
        self._store, self._port = serve_store()
        self._store.set(CHANGES, "")
        self._workers: dict[int, SlotWorker] = {}
        self._usable: set[int] = set()
        self._changes: list[int] = []
        self._generation = 0
        self._members: list[SlotWorker] = []
        self._members_store: Any = None
        self._lives: dict[int, int] = {}  # by slot: workers so far
        self._failures: dict[int, int] = {}
        self._idle_failures: dict[int, int] = {}  # of them, in a row, before the worker had met the others
        self._not_before: dict[int, float] = {}
        self._finishing = False
        self._waiting_since: float | None = None
        self._environment = {**handed_on(os.environ), **plan.job.environment}
        self._starter = WorkerStarter()
        self._starter.prepare(plan.job.command, self._environment)

    def run(self) -> None:
        """Work until all workers have ended well.

        Raises:
            JobFailedError: The job cannot go on.
        """
        self._starter.wait()
        if self._starter.obstacle:
            say(f"lockstep: each worker starts by itself: {self._starter.obstacle}")
        while True:
            self._collect_ended()
            if self._finishing and not self._workers:
                return
            self._update_slots()
            self._hear()
            self._start_workers()
            self._dismiss()
            self._form_generation()
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End every worker with what it has started; SIGKILL for what SIGTERM does not end."""
        self._starter.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._workers.values():
                worker.end(number)
            deadline = time.monotonic() + Timings().elastic_end
            while time.monotonic() < deadline and any(each.process.poll() is None for each in self._workers.values()):
                time.sleep(POLL_SECONDS)
        kill_descendants()

    def _collect_ended(self) -> None:
        for worker in list(self._workers.values()):
            code = worker.process.poll()
            if code is None:
                continue
            del self._workers[worker.slot]
            worker.end(signal.SIGKILL)  # what it has left behind
            if code and not worker.dismissed:
                self._note_failure(worker, code)
            elif not worker.dismissed:
                self._finishing = True

    def _note_failure(self, worker: SlotWorker, code: int) -> None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        who = f"the worker of slot {worker.slot}" if worker.rank is None else f"worker {worker.rank}"
        text = f"{who} {how}"
        slot = worker.slot
        self._failures[slot] = self._failures.get(slot, 0) + 1
        self._idle_failures[slot] = self._idle_failures.get(slot, 0) + 1 if worker.rank is None else 0
        if self._finishing:
            raise JobFailedError(f"{text} when others had finished")
        if not self._generation:
            raise JobFailedError(f"{text} before the job had begun")
        if worker in self._members:
            self._members_store = None  # closes it: nobody shall wait there for the dead
        if not self._survivors:
            raise JobFailedError(f"{text}, and no worker is left whose state the job could go on with")
        if self._idle_failures[slot] >= STARTS:
            raise JobFailedError(f"{text}; {STARTS} workers of its slot in a row did not get to meet the others")
        self._check_resets(text)
        least, most = self._plan.cooldown_seconds
        self._not_before[slot] = time.monotonic() + min(most, least * 2 ** min(self._failures[slot] - 1, 30))
        say(f"lockstep: {text}; the others wait for a new worker in its slot")

    def _check_resets(self, text: str) -> None:
        limit = self._plan.reset_limit
        if limit is not None and self._generation > limit:
            raise JobFailedError(f"{text}, and --reset-limit {limit} allows no further reset")

    def _update_slots(self) -> None:
        """Find the slots that may be used now, and tell the workers what has changed."""
        slots, now = self._slots(), time.monotonic()
        if self._plan.maximum is not None:
            slots = min(slots, self._plan.maximum)
        usable = {slot for slot in self._kept(slots) if self._not_before.get(slot, 0.0) <= now}
        for change, difference in ((ADDED, usable - self._usable), (REMOVED, self._usable - usable)):
            if difference and not self._finishing:
                self._changes.append(change)
                self._store.set(CHANGES, " ".join(map(str, self._changes)))
        self._usable = usable

    def _kept(self, slots: int) -> list[int]:
        """Which slots are in use when there are so many: the survivors', by rank, for they hold the job's state."""
        held = [member.slot for member in self._survivors]
        return [*held, *(slot for slot in range(slots) if slot not in held)][:slots]

    @property
    def _survivors(self) -> list[SlotWorker]:
        """The members of the present generation that live and are to stay."""
        return [worker for worker in self._members if worker in self._workers.values() and not worker.dismissed]

    def _hear(self) -> None:
        """Read who asks for a place."""
        for worker in self._workers.values():
            key = ask_key(worker.name)
            if worker.after is None and self._store.check([key]):
                worker.after = int(self._store.get(key))
                self._store.delete_key(key)

    @property
    def _meeting(self) -> bool:
        """Whether a new generation is under way: at the beginning, after a death, or when a worker asks."""
        asking = any(worker.after is not None for worker in self._workers.values())
        return not self._finishing and (asking or self._members_store is None or not self._workers)

    def _start_workers(self) -> None:
        if self._meeting:
            new = sorted(self._usable - self._workers.keys())
            slots = self._expected_slots(new)
            for slot in new:
                self._workers[slot] = self._start(slot, horovod_variables(slots.index(slot), slots))

    def _expected_slots(self, new: Collection[int]) -> list[int]:
        """The slots by rank, if those who live and the new workers meet: as `ranked` has it."""
        old = [member.slot for member in self._members if member in self._workers.values()]
        return [*old, *sorted((self._workers.keys() | set(new)) - set(old))]

    def _start(self, slot: int, place: Mapping[str, str]) -> SlotWorker:
        life = self._lives[slot] = self._lives.get(slot, -1) + 1
        variables = {
            **self._environment,
            **place,
            "HOROVOD_ELASTIC": "1",
            LIFE: str(life),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._port),
        }
        streams = self._output.open(slot, "stdout"), self._output.open(slot, "stderr")
        assert streams[0].writer is not None
        assert streams[1].writer is not None
        writers = streams[0].writer, streams[1].writer
        forked = self._starter.fork([variables], os.getcwd(), "none", [writers])
        child = forked[0] if forked else start(self._plan.job.command, variables, "none", writers)
        for stream in streams:
            stream.release()
        return SlotWorker(slot, worker_name(variables["HOROVOD_HOSTNAME"], slot, life), child, streams)

    def _dismiss(self) -> None:
        """Tell the workers that are not needed any more, and ask, to end; none while there are too few slots."""
        if not self._finishing and len(self._usable) < self._plan.minimum:
            return
        for worker in self._workers.values():
            if worker.after is not None and (self._finishing or worker.slot not in self._usable):
                self._answer(worker, {})
                worker.dismissed = True

    def _form_generation(self) -> None:
        if not self._meeting:
            self._waiting_since = None
            return
        members = [worker for worker in self._workers.values() if not worker.dismissed]
        enough = len(members) >= (self._plan.minimum if self._generation else self._plan.initial)
        if not enough or any(worker.after is None or worker.slot not in self._usable for worker in members):
            self._check_patience(members)
            return
        self._check_resets("the workers would have to meet anew")
        self._waiting_since = None
        self._generation += 1
        self._members = ranked(self._members, members)
        self._members_store, port = serve_store()
        common = {"generation": self._generation, "port": port, "changes": len(self._changes)}
        for worker, place in zip(self._members, places(self._members), strict=True):
            worker.rank = worker.streams[0].rank = worker.streams[1].rank = place["rank"]
            self._answer(worker, {**place, **common})

    def _answer(self, worker: SlotWorker, answer: Mapping[str, int]) -> None:
        assert worker.after is not None
        self._store.set(answer_key(worker.name, worker.after), json.dumps(answer))
        worker.after = None

    def _check_patience(self, members: Sequence[SlotWorker]) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since > self._plan.timeout_seconds:
            asking = sum(worker.after is not None for worker in members)
            need = f"-np {self._plan.initial}" if not self._generation else f"--min-np {self._plan.minimum}"
            raise JobFailedError(
                f"{asking} of {len(members)} workers met within --elastic-timeout {self._plan.timeout_seconds:g} s; "
                f"the job needs all that run, and {need} at least; there are {len(self._usable)} slots"
            )
