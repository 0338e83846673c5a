"""The engine of many workers in one process and in virtual time: the real Channel and Control of each, over no network.

Each worker's communication thread is the real one; it takes turns with the others, one at a time, and gives the turn
away where it would wait for its bell or for a message. What it computes between is timed. The cost of a piece of work
is the median over all workers and rounds that did the same piece, so that a disturbance of the simulating machine does
not become one worker's and hold up the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from message_costs import MessageCosts
from virtual_time import Network, Receive, Rest, Send, Simulation, Spent

from lockstep.hvd.engine import channel as channel_module
from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.connections import Links
from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.request import Request
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.timeline import Timeline

END_SECONDS = 5.0  # for a thread to end
LOOK_SECONDS = 1.0  # until a thread that keeps the turn is looked at
STACK_BYTES = 512 << 10
Label = tuple[Any, ...]


class Stopwatch:
    """Seconds of pieces of work by their label; a piece costs the median of what was measured under its label."""

    def __init__(self) -> None:
        self._measured: dict[Label, list[float]] = defaultdict(list)
        self._costs: dict[Label, float] = {}

    def settle(self) -> None:
        """Measure no more what has been measured."""
        self._costs.update({label: median(seconds) for label, seconds in self._measured.items()})

    def cost(self, label: Label, seconds: float) -> float:
        if label in self._costs:
            return self._costs[label]
        self._measured[label].append(seconds)
        return seconds


class _Group:
    """Stands for the Gloo group of one worker."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Group:
        worker = self._worker
        worker.pause("send")
        worker.did.append(Send(to, tensors[0].nbytes, tensors[0].clone()))
        worker.resume()
        return self

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Receiving:
        worker = self._worker
        worker.pause("recv")
        worker.did.append(Spent(worker.costs.receive(tensors[0].nbytes)))
        worker.resume()
        return _Receiving(worker, tensors[0], source)

    def wait(self, timeout: Any = None) -> None:
        """A message that was sent is in the sender's kernel."""


class _Receiving:
    def __init__(self, worker: SimulatedWorker, tensor: torch.Tensor, source: int) -> None:
        self._worker = worker
        self._tensor = tensor
        self._source = source

    def wait(self, timeout: Any = None) -> None:
        worker = self._worker
        worker.pause("wait")
        self._tensor.copy_(worker.give_turn_away(Receive(self._source)))
        worker.resume()


class _Bell:
    """The channel's bell in virtual time."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._rung = False

    def ring(self) -> None:
        self._rung = True
        self._worker.rung = True

    def wait(self, timeout_seconds: float = -1) -> None:
        worker = self._worker
        worker.pause("rest")
        if not self._rung:
            worker.give_turn_away(Rest(timeout_seconds))
        self._rung = False
        worker.resume()


class SimulatedWorker:
    """A worker: an application that submits, and the real engine below it."""

    def __init__(self, rank: int, size: int, costs: MessageCosts, stopwatch: Stopwatch, settings: Settings) -> None:
        self.rank = rank
        self.costs = costs
        self.did: list[Spent | Send] = []
        self.rung = False
        self.requests: list[Request] = []
        self.finished: Callable[[float], None] | None = None
        self._stopwatch = stopwatch
        self._waits: Receive | Rest | None = None
        self._content: Any = None
        self._turn, self._given = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._given.acquire()
        self._began: float | None = None
        self._work: list[str] = []  # the pieces of work since the bell rang last
        links = Links(None, None, rank, size)  # type: ignore[arg-type]
        control = Control(_Group(self), rank, size)
        with mock.patch.object(channel_module, "Bell", return_value=_Bell(self)):
            self.channel = Channel(range(size), control, links, settings, Timeline(), lambda: None)
        self._await_turn()

    def submit(self, requests: Sequence[Callable[[], Request]], hurry: bool) -> float:
        """Make requests and hand them to the engine, as an application's thread does; returns the seconds it takes."""
        began = time.perf_counter()
        self.requests = [self.channel.submit(make()) for make in requests]
        if hurry:
            self.channel.hurry()
        return self._stopwatch.cost(("submit", len(requests), hurry), time.perf_counter() - began)

    def go_on(self, content: Any) -> tuple[list[Spent | Send], Receive | Rest | None]:
        self._content = content
        self._turn.release()
        self._await_turn()
        did, self.did = self.did, []
        return did, self._waits

    def has_run(self, until: float) -> None:
        if self.finished and self.requests and all(request.finished for request in self.requests):
            self.finished(until)

    def end(self) -> None:
        """End the thread."""
        self.channel.close("the simulation is over")
        self._turn.release()
        self.channel.wait_for_end(END_SECONDS)

    def give_turn_away(self, waits: Receive | Rest) -> Any:
        """Called by the communication thread: let the simulation go on, until it gives this thread another turn."""
        if isinstance(waits, Rest):
            self._work = []
        self._waits = waits
        self._given.release()
        self._turn.acquire()
        content, self._content = self._content, None
        return content

    def pause(self, name: str) -> None:
        """Called by the communication thread where the engine's own work stops."""
        if self._began is not None:  # else the thread has just begun
            seconds = time.perf_counter() - self._began
            self._work.append(name)
            self.did.append(Spent(self._stopwatch.cost(tuple(self._work), seconds)))

    def resume(self) -> None:
        self._began = time.perf_counter()

    def _await_turn(self) -> None:
        while not self._given.acquire(timeout=LOOK_SECONDS):
            if self.channel.is_closed:
                raise RuntimeError(f"the engine of simulated worker {self.rank} has failed")


@contextmanager
def on_one_core() -> Iterator[None]:
    """Threads that take turns do so several times as fast on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class SimulatedJob:
    """`size` workers; an application on each submits the same requests in every round, when its last ones are done."""

    def __init__(self, size: int, costs: MessageCosts, network: Network, settings: Settings | None = None) -> None:
        self.size = size
        self.simulation = Simulation(costs, network)
        self.stopwatch = Stopwatch()
        before = threading.stack_size(STACK_BYTES)
        try:
            self.workers = [
                SimulatedWorker(rank, size, costs, self.stopwatch, settings or Settings()) for rank in range(size)
            ]
        finally:
            threading.stack_size(before)
        for worker in self.workers:
            worker.did.clear()
            self.simulation.add(worker, Rest())

    def rounds(
        self,
        count: int,
        requests: Callable[[int], Sequence[Callable[[], Request]]],
        hurry: bool = False,
        late: Callable[[int], float] = lambda rank: 0.0,
    ) -> list[float]:
        """Do rounds; returns when each was over for the last worker, in virtual seconds since they began.

        Args:
            requests: What a worker submits in each round, by rank.
            late: How much later than the others a worker begins.
        """
        simulation, begins = self.simulation, self.simulation.at_rest
        ends: list[list[float]] = [[] for _ in range(count)]

        def begin(worker: SimulatedWorker, number: int) -> None:
            seconds = worker.submit(requests(worker.rank), hurry)
            submitted = simulation.compute(simulation.now, seconds)
            worker.finished = lambda until: end(worker, number, until)
            if worker.rung:
                worker.rung = False
                simulation.at(submitted, lambda: simulation.ring(worker.rank, submitted))

        def end(worker: SimulatedWorker, number: int, until: float) -> None:
            worker.finished = None
            woken = simulation.compute(until, simulation.costs.thread_wake)
            ends[number].append(woken)
            if number + 1 < count:
                simulation.at(woken, lambda: begin(worker, number + 1))

        for worker in self.workers:
            simulation.at(begins + late(worker.rank), lambda worker=worker: begin(worker, 0))  # type: ignore[misc]
        simulation.run(until=lambda: len(ends[-1]) == self.size)
        if len(ends[-1]) < self.size:
            raise RuntimeError(f"only {len(ends[-1])} of {self.size} simulated workers came to the end of the rounds")
        return [max(moments) - begins for moments in ends]

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
