"""The driver of an elastic job: one worker a slot, replaced alone when it dies.

The workers ask for their places (see `lockstep.world.elastic_rendezvous`), and a new generation forms when all living
ones have. A worker that survives keeps its process, and rank 0, whose state the others take over, is a survivor. What a
worker is, a process here or an actor elsewhere, is the caller's. Rules as Horovod's, except that a failed worker's host
is not given up: its slot gets a new worker.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lockstep.launch.output.display import say
from lockstep.launch.plan.elastic_rules import ElasticRules
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.timings import Timings
from lockstep.world.elastic_rendezvous import ADDED, CHANGES, LIFE, REMOVED, answer_key, ask_key, worker_name
from lockstep.world.store import LOOPBACK, serve_store

POLL_SECONDS = 0.05
STARTS = 3  # workers of a slot that may end in a row without having met the others


class JobFailedError(Exception):
    """The job cannot go on; the message says why."""


class HostSlot(NamedTuple):
    """A worker's seat: on which host, and which of those there."""

    host: str
    number: int


class Running(Protocol):
    """A worker that has been started."""

    def poll(self) -> str | None:
        """None while it runs, then how it failed, such as "failed with exit code 1"; "" if it did not."""

    def end(self, number: signal.Signals) -> None:
        """Ask the worker, and what it has started, to end (SIGTERM), or make it (SIGKILL)."""

    def take_rank(self, rank: int) -> None:
        """Note its rank from now on."""


@dataclass(eq=False)
class SlotWorker:
    """A slot's worker. `after` is the generation it asks to leave, or None; `rank` counts in the present one."""

    slot: HostSlot
    name: str
    running: Running
    after: int | None = None
    rank: int | None = None
    dismissed: bool = False


def ranked(members: Iterable[SlotWorker], workers: Iterable[SlotWorker]) -> list[SlotWorker]:
    """The next generation by rank: host by host, who was a member before the others, and these by slot.

    The first host is that of the first survivor, so that rank 0 is one.
    """
    living = list(workers)
    old = [worker for worker in members if worker in living]
    row = old + sorted((worker for worker in living if worker not in old), key=lambda worker: worker.slot)
    hosts = list(dict.fromkeys(worker.slot.host for worker in row))
    return sorted(row, key=lambda worker: hosts.index(worker.slot.host))


def places(slots: Sequence[HostSlot]) -> list[dict[str, int]]:
    """Each worker's place; the slots are in the order of ranks.

    The local rank is the slot's number and may exceed the local size: a survivor keeps its GPU, and no new worker takes
    it.
    """
    hosts = [slot.host for slot in slots]
    nodes = list(dict.fromkeys(hosts))
    return [
        {
            "rank": rank,
            "size": len(slots),
            "local_rank": slot.number,
            "local_size": hosts.count(slot.host),
            "node": nodes.index(slot.host),
            "nodes": len(nodes),
        }
        for rank, slot in enumerate(slots)
    ]


def horovod_variables(place: Mapping[str, int]) -> dict[str, str]:
    """What a worker reads in its environment of its place at its start; hvd.init() tells it what has become of it."""
    return {
        "HOROVOD_RANK": str(place["rank"]),
        "HOROVOD_SIZE": str(place["size"]),
        "HOROVOD_LOCAL_RANK": str(place["local_rank"]),
        "HOROVOD_LOCAL_SIZE": str(place["local_size"]),
        "HOROVOD_CROSS_RANK": str(place["node"]),
        "HOROVOD_CROSS_SIZE": str(place["nodes"]),
    }


class Driver:
    """The state of an elastic job, and the step that moves it.

    Args:
        hosts: Those that the job may have at the moment.
        start: Starts a slot's worker with variables on top of its own; None where that must wait.
        address: This machine's, where the workers reach it.
    """

    def __init__(
        self,
        rules: ElasticRules,
        hosts: Callable[[], Sequence[Host]],
        start: Callable[[HostSlot, Mapping[str, str]], Running | None],
        address: str = LOOPBACK,
    ) -> None:
        self._rules = rules
        self._hosts = hosts
        self._start = start
        self._address = address
        self._store, self._port = serve_store(address)
        self._store.set(CHANGES, "")
        self.finished: list[SlotWorker] = []
        self._workers: dict[HostSlot, SlotWorker] = {}
        self._usable: set[HostSlot] = set()
        self._changes: list[int] = []
        self._generation = 0
        self._members: list[SlotWorker] = []
        self._members_store: Any = None
        self._lives: dict[HostSlot, int] = {}  # workers so far
        self._failures: dict[HostSlot, int] = {}
        self._idle_failures: dict[HostSlot, int] = {}  # of them, in a row, before the worker had met the others
        self._not_before: dict[HostSlot, float] = {}
        self._finishing = False
        self._waiting_since: float | None = None

    def step(self) -> bool:
        """Look what has happened, and act on it; whether all workers have ended well.

        Call it every POLL_SECONDS.

        Raises:
            JobFailedError: The job cannot go on.
        """
        self._collect_ended()
        if self._finishing and not self._workers:
            return True
        self._update_slots()
        self._hear()
        self._start_workers()
        self._dismiss()
        self._form_generation()
        return False

    def end(self) -> None:
        """End every worker with what it has started; SIGKILL for what SIGTERM does not end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._workers.values():
                worker.running.end(number)
            deadline = time.monotonic() + Timings().elastic_end
            while time.monotonic() < deadline and any(each.running.poll() is None for each in self._workers.values()):
                time.sleep(POLL_SECONDS)

    def _collect_ended(self) -> None:
        for worker in list(self._workers.values()):
            how = worker.running.poll()
            if how is None:
                continue
            del self._workers[worker.slot]
            worker.running.end(signal.SIGKILL)  # what it has left behind
            if worker.dismissed:
                continue
            if how:
                self._note_failure(worker, how)
            else:
                self.finished.append(worker)
                self._finishing = True

    def _note_failure(self, worker: SlotWorker, how: str) -> None:
        who = self._slot_text(worker.slot) if worker.rank is None else f"worker {worker.rank}"
        text = f"{who} {how}"
        slot = worker.slot
        self._failures[slot] = self._failures.get(slot, 0) + 1
        self._idle_failures[slot] = self._idle_failures.get(slot, 0) + 1 if worker.rank is None else 0
        if self._finishing:
            raise JobFailedError(f"{text} after other workers had finished")
        if not self._generation:
            raise JobFailedError(f"{text} before the job had started")
        if worker in self._members:
            self._members_store = None  # closes it: nobody shall wait there for the dead
        if not self._survivors:
            raise JobFailedError(f"{text}, and no worker with a usable state is left")
        if self._idle_failures[slot] >= STARTS:
            raise JobFailedError(f"{text}; {STARTS} consecutive workers in this slot exited before joining")
        self._check_resets(text)
        least, most = self._rules.cooldown_seconds
        self._not_before[slot] = time.monotonic() + min(most, least * 2 ** min(self._failures[slot] - 1, 30))
        say(f"lockstep: {text}; the others wait for its replacement")

    def _check_resets(self, text: str) -> None:
        limit = self._rules.reset_limit
        if limit is not None and self._generation > limit:
            raise JobFailedError(f"{text}, and the reset limit, {limit}, allows no further reset")

    def _update_slots(self) -> None:
        """Find the slots that may be used now, and tell the workers what has changed."""
        now = time.monotonic()
        usable = {slot for slot in self._kept(self._hosts()) if self._not_before.get(slot, 0.0) <= now}
        for change, difference in ((ADDED, usable - self._usable), (REMOVED, self._usable - usable)):
            if difference and not self._finishing:
                self._changes.append(change)
                self._store.set(CHANGES, " ".join(map(str, self._changes)))
        self._usable = usable

    def _kept(self, hosts: Iterable[Host]) -> list[HostSlot]:
        """The slots in use when there are these.

        The survivors' come first, by rank, for they hold the job's state; then those of workers that are starting,
        which a list of hosts in another order must not end.
        """
        held = [member.slot for member in self._survivors]
        held += [slot for slot, worker in self._workers.items() if not worker.dismissed and slot not in held]
        kept = []
        for host in hosts:
            own = [slot for slot in held if slot.host == host.name]
            free = [slot for slot in (HostSlot(host.name, number) for number in range(host.slots)) if slot not in own]
            kept += [*own, *free][: host.slots]
        return sorted(kept, key=lambda slot: held.index(slot) if slot in held else len(held))[: self._rules.maximum]

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
            for slot, place in zip(slots, places(slots), strict=True):
                if slot in new and (worker := self._started(slot, place)):
                    self._workers[slot] = worker

    def _expected_slots(self, new: Collection[HostSlot]) -> list[HostSlot]:
        """The slots by rank, if those who live and the new workers meet."""
        nobody: Any = None
        coming = [SlotWorker(slot, "", nobody) for slot in new]
        return [worker.slot for worker in ranked(self._members, [*self._workers.values(), *coming])]

    def _started(self, slot: HostSlot, place: Mapping[str, int]) -> SlotWorker | None:
        life = self._lives.get(slot, -1) + 1
        variables = {
            **horovod_variables(place),
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": slot.host,
            LIFE: str(life),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._port),
        }
        running = self._start(slot, variables)
        if running is None:
            return None
        self._lives[slot] = life
        return SlotWorker(slot, worker_name(slot.host, slot.number, life), running)

    def _dismiss(self) -> None:
        """Tell the workers that are not needed any more, and ask, to end; none while there are too few slots.

        A new one whose slot is gone is ended at once: where the host is gone, it will never ask.
        """
        for worker in self._workers.values():
            if worker.rank is None and worker.after is None and worker.slot not in self._usable:
                worker.running.end(signal.SIGKILL)
                worker.dismissed = True
        if not self._finishing and len(self._usable) < self._rules.minimum:
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
        enough = len(members) >= (self._rules.minimum if self._generation else self._rules.initial)
        if not enough or any(worker.after is None or worker.slot not in self._usable for worker in members):
            self._check_patience(members)
            return
        self._check_resets("the workers would have to form a new generation")
        self._waiting_since = None
        self._generation += 1
        self._members = ranked(self._members, members)
        self._members_store, port = serve_store(self._address)
        common = {"generation": self._generation, "port": port, "changes": len(self._changes)}
        for worker, place in zip(self._members, places([worker.slot for worker in self._members]), strict=True):
            worker.rank = place["rank"]
            worker.running.take_rank(place["rank"])
            self._answer(worker, {**place, **common})

    def _answer(self, worker: SlotWorker, answer: Mapping[str, int]) -> None:
        assert worker.after is not None
        self._store.set(answer_key(worker.name, worker.after), json.dumps(answer))
        worker.after = None

    def _check_patience(self, members: Sequence[SlotWorker]) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since > self._rules.timeout_seconds:
            asking = sum(worker.after is not None for worker in members)
            need = self._rules.minimum if self._generation else self._rules.initial
            raise JobFailedError(
                f"{asking} of {len(members)} workers met within the elastic timeout of {self._rules.timeout_seconds:g} "
                f"s; the job needs all that run, and {need} at least; there are {len(self._usable)} slots"
            )

    @staticmethod
    def _slot_text(slot: HostSlot) -> str:
        return f"the worker of slot {slot.number} on {slot.host}"
