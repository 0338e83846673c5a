"""The driver of an elastic job: one worker per slot, each replaced individually when it dies.

The workers request their rank info (see `lockstep.world.elastic_rendezvous`), and a new generation forms when all
living workers have done so. A survivor keeps its process, and rank 0, whose state the others copy, is a survivor. The
caller decides what a worker is, such as a local process or a Ray actor. The rules are Horovod's, except that a failed
worker's host is not blacklisted: its slot gets a new worker.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lockstep.files.output import say
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import cross_variables
from lockstep.launch.plan.options import ElasticRules
from lockstep.launch.plan.timings import Timings
from lockstep.world.elastic_rendezvous import ADDED, CHANGES, LIFE, REMOVED, answer_key, ask_key, worker_name
from lockstep.world.interfaces import LOOPBACK
from lockstep.world.rendezvous import serve_store

POLL_SECONDS = 0.05
STARTS = 3  # the most consecutive workers of a slot that may exit before joining a generation


class JobFailedError(Exception):
    """The job cannot continue; the message gives the reason."""


class HostSlot(NamedTuple):
    """A slot for a worker: the host, and the slot's number there."""

    host: str
    number: int


class Running(Protocol):
    """A worker that has been started."""

    def poll(self) -> str | None:
        """Return None while it runs, "" after success, or the failure, such as "failed with exit code 1"."""

    def end(self, number: signal.Signals) -> None:
        """Send SIGTERM or SIGKILL to the worker and its descendants."""

    def take_rank(self, rank: int) -> None:
        """Record its rank in the new generation."""


@dataclass(eq=False)
class SlotWorker:
    """A slot's worker.

    Args:
        after: The generation after which it requests new rank info; None while it does not.
        rank: Its rank in its latest generation; None before its first.
        dismissed: It was ended or asked to exit, because it is not needed.
    """

    slot: HostSlot
    name: str
    running: Running
    after: int | None = None
    rank: int | None = None
    dismissed: bool = False


def ranked(members: Iterable[SlotWorker], workers: Iterable[SlotWorker]) -> list[SlotWorker]:
    """Return the workers of the next generation by rank, grouped by host: survivors first, then new ones by slot.

    The first host is that of the first survivor, so that rank 0 is a survivor.
    """
    living = list(workers)
    old = [worker for worker in members if worker in living]
    row = old + sorted((worker for worker in living if worker not in old), key=lambda worker: worker.slot)
    hosts = list(dict.fromkeys(worker.slot.host for worker in row))
    return sorted(row, key=lambda worker: hosts.index(worker.slot.host))


def rank_info(slots: Sequence[HostSlot]) -> list[dict[str, int]]:
    """Return each worker's rank info, for slots in the order of ranks.

    The local rank is the slot's number, which may exceed the local size: a survivor keeps its GPU, and no new worker
    uses it.
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
        }
        for rank, slot in enumerate(slots)
    ]


def horovod_variables(info: Mapping[str, int], slots: Sequence[HostSlot]) -> dict[str, str]:
    """Return Horovod's variables with a worker's expected rank info; the worker gets the final one from hvd.init().

    Args:
        slots: Of all workers, in the order of ranks.
    """
    local_ranks: dict[str, set[int]] = {}
    for slot in slots:
        local_ranks.setdefault(slot.host, set()).add(slot.number)
    return {
        "HOROVOD_RANK": str(info["rank"]),
        "HOROVOD_SIZE": str(info["size"]),
        "HOROVOD_LOCAL_RANK": str(info["local_rank"]),
        "HOROVOD_LOCAL_SIZE": str(info["local_size"]),
        **cross_variables(info["node"], info["local_rank"], list(local_ranks.values())),
    }


class Driver:
    """The state machine of an elastic job, advanced by `step`.

    Args:
        hosts: Return the hosts that the job may use now.
        start: Start a slot's worker with additional environment variables; return None if the slot is not ready yet.
        address: This machine's address, at which the workers reach it.
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
        self._lives: dict[HostSlot, int] = {}  # the index of each slot's latest worker
        self._failures: dict[HostSlot, int] = {}
        self._idle_failures: dict[HostSlot, int] = {}  # consecutive, before joining a generation
        self._not_before: dict[HostSlot, float] = {}
        self._finishing = False
        self._waiting_since: float | None = None

    def step(self) -> bool:
        """Process the events since the last call; return whether all workers have finished successfully.

        Call it every POLL_SECONDS.

        Raises:
            JobFailedError: The job cannot continue.
        """
        self._collect_ended()
        if self._finishing and not self._workers:
            return True
        self._update_slots()
        self._read_requests()
        self._start_workers()
        self._dismiss()
        self._form_generation()
        return False

    def end(self) -> None:
        """End every worker and its descendants: with SIGTERM, then with SIGKILL."""
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
            worker.running.end(signal.SIGKILL)  # its orphaned descendants
            if worker.dismissed:
                continue
            if how:
                self._note_failure(worker, how)
            else:
                self.finished.append(worker)
                self._finishing = True

    def _note_failure(self, worker: SlotWorker, how: str) -> None:
        name = self._slot_text(worker.slot) if worker.rank is None else f"worker {worker.rank}"
        text = f"{name} {how}"
        slot = worker.slot
        self._failures[slot] = self._failures.get(slot, 0) + 1
        self._idle_failures[slot] = self._idle_failures.get(slot, 0) + 1 if worker.rank is None else 0
        if self._finishing:
            raise JobFailedError(f"{text} after other workers had finished")
        if not self._generation:
            raise JobFailedError(f"{text} before the job had started")
        if worker in self._members:
            self._members_store = None  # closes it, so that no worker waits there for the dead one
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
            raise JobFailedError(f"{text}; the reset limit of {limit} is reached")

    def _update_slots(self) -> None:
        """Find the slots that may be used now, and publish changes to the workers."""
        now = time.monotonic()
        usable = {slot for slot in self._kept(self._hosts()) if self._not_before.get(slot, 0.0) <= now}
        for change, difference in ((ADDED, usable - self._usable), (REMOVED, self._usable - usable)):
            if difference and not self._finishing:
                self._changes.append(change)
                self._store.set(CHANGES, " ".join(map(str, self._changes)))
        self._usable = usable

    def _kept(self, hosts: Iterable[Host]) -> list[HostSlot]:
        """Return the slots of these hosts that the job uses, up to the maximum.

        Survivors' slots come first, by rank, because they hold the job's state; then those of starting workers, so that
        a reordered list of hosts does not end them.
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
        """The members of the current generation that live and are not dismissed."""
        return [worker for worker in self._members if worker in self._workers.values() and not worker.dismissed]

    def _read_requests(self) -> None:
        """Read which workers request rank info."""
        for worker in self._workers.values():
            key = ask_key(worker.name)
            if worker.after is None and self._store.check([key]):
                worker.after = int(self._store.get(key))
                self._store.delete_key(key)

    @property
    def _meeting(self) -> bool:
        """Whether a new generation is forming: at the start, after a death, or when a worker requests rank info."""
        asking = any(worker.after is not None for worker in self._workers.values())
        return not self._finishing and (asking or self._members_store is None or not self._workers)

    def _start_workers(self) -> None:
        if self._meeting:
            new = sorted(self._usable - self._workers.keys())
            slots = self._expected_slots(new)
            for slot, info in zip(slots, rank_info(slots), strict=True):
                if slot in new and (worker := self._started(slot, horovod_variables(info, slots))):
                    self._workers[slot] = worker

    def _expected_slots(self, new: Collection[HostSlot]) -> list[HostSlot]:
        """Return the slots by rank, if the living and the new workers form a generation."""
        not_running: Any = None
        expected = [SlotWorker(slot, "", not_running) for slot in new]
        return [worker.slot for worker in ranked(self._members, [*self._workers.values(), *expected])]

    def _started(self, slot: HostSlot, rank_variables: Mapping[str, str]) -> SlotWorker | None:
        life = self._lives.get(slot, -1) + 1
        variables = {
            **rank_variables,
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
        """Answer unneeded workers that request rank info with a dismissal, unless there are too few slots.

        A new worker whose slot is gone is killed immediately: if its host is gone, it will never send a request.
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
        self._check_resets("a new generation is needed")
        self._waiting_since = None
        self._generation += 1
        self._members = ranked(self._members, members)
        self._members_store, port = serve_store(self._address)
        common = {"generation": self._generation, "port": port, "changes": len(self._changes)}
        for worker, info in zip(self._members, rank_info([worker.slot for worker in self._members]), strict=True):
            worker.rank = info["rank"]
            worker.running.take_rank(info["rank"])
            self._answer(worker, {**info, **common})

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
                f"{asking} of {len(members)} workers joined within the elastic timeout of "
                f"{self._rules.timeout_seconds:g} s; the job needs all running workers and at least {need}; "
                f"{len(self._usable)} slots are available"
            )

    @staticmethod
    def _slot_text(slot: HostSlot) -> str:
        return f"the worker of slot {slot.number} on {slot.host}"
