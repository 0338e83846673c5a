"""Workers that pass messages in virtual time: a discrete-event simulation of their threads, cores and messages.

An actor is the communication thread of a worker. It runs until it has to wait, for a message or for its bell, and says
what it did until then: processor time, and messages sent. The simulation finds when that was, given the cores and what
messages cost, and lets it go on when what it waits for is there.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from message_costs import MessageCosts


@dataclass(frozen=True)
class Network:
    """What lies between the workers.

    Args:
        latency: Seconds from a host to another, on top of what a message costs on one host.
        per_byte: Seconds a byte on a host's link, one message after the other.
        cores: That all workers share; None where each has as many as it needs.
    """

    latency: float = 0.0
    per_byte: float = 0.0
    cores: int | None = None


class Spent(NamedTuple):
    """Processor time."""

    seconds: float


class Send(NamedTuple):
    """A message that is handed to the network."""

    to: int
    size_bytes: int
    content: Any = None


class Receive(NamedTuple):
    """Waits for the next message from a worker."""

    source: int


class Rest(NamedTuple):
    """Waits for the bell, at most so many seconds; for ever where that is below 0."""

    seconds: float = -1.0


class Actor(Protocol):
    """A worker's communication thread."""

    rank: int

    def go_on(self, content: Any) -> tuple[list[Spent | Send], Receive | Rest | None]:
        """Run until it waits, given the message it waited for; None where it has come to its end."""

    def has_run(self, until: float) -> None:
        """Told when what it did last has ended."""


@dataclass
class _Place:
    """Where an actor's host is in time."""

    actor: Actor
    waits: Receive | Rest | None = None
    since: float = 0.0
    turn: int = 0  # how often it has gone on, by which a timeout knows whether it still counts
    reader_free: float = 0.0
    link_free: float = 0.0
    arrived: dict[int, deque[tuple[float, Any, int]]] = field(default_factory=dict)


class Simulation:
    """Actors by rank; `busy_seconds` and `messages` count what all of them have spent and sent."""

    def __init__(self, costs: MessageCosts, network: Network) -> None:
        self.costs = costs
        self.network = network
        self.now = 0.0
        self.busy_seconds = 0.0
        self.messages = 0
        self.bytes_sent = 0
        self._places: dict[int, _Place] = {}
        self._cores = [0.0] * network.cores if network.cores else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def add(self, actor: Actor, waits: Rest | None = None) -> None:
        """An actor that begins now, or that waits already."""
        self._places[actor.rank] = place = _Place(actor, waits)
        if waits is None:
            self.at(self.now, lambda: self._go_on(place, self.now, None))

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Do something at a moment."""
        heapq.heappush(self._events, (moment, next(self._numbers), event))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Go on until nothing happens any more, or a condition holds."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()

    def compute(self, ready: float, seconds: float) -> float:
        """Spend processor time from `ready` on, when a core is free; returns when it ends."""
        self.busy_seconds += seconds
        if self._cores is None:
            return ready + seconds
        end = max(ready, heapq.heappop(self._cores)) + seconds
        heapq.heappush(self._cores, end)
        return end

    @property
    def at_rest(self) -> float:
        """The moment from which on nobody works any more, where nothing is left to happen."""
        return max([self.now, *(place.since for place in self._places.values())])

    def ring(self, rank: int, moment: float) -> None:
        """Wake an actor that rests."""
        place = self._places[rank]
        if isinstance(place.waits, Rest):
            wakes = self.compute(max(moment, place.since), self.costs.thread_wake)
            place.waits = None
            self.at(wakes, lambda: self._go_on(place, wakes, None))

    def _go_on(self, place: _Place, ready: float, content: Any, spent: float = 0.0) -> None:
        place.turn += 1
        place.waits = None
        did, waits = place.actor.go_on(content)
        total = spent + sum(self._seconds(step) for step in did)
        end = self.compute(ready, total)
        moment = end - total + spent
        for step in did:
            moment += self._seconds(step)
            if isinstance(step, Send):
                self._send(place, step, moment)
        place.since = end
        place.waits = waits
        place.actor.has_run(end)
        if isinstance(waits, Receive):
            self._take(place)
        elif isinstance(waits, Rest) and waits.seconds >= 0:
            turn, timeout = place.turn, end + waits.seconds
            self.at(timeout, lambda: self._time_out(place, turn, timeout))

    def _seconds(self, step: Spent | Send) -> float:
        return step.seconds if isinstance(step, Spent) else self.costs.send(step.size_bytes)

    def _time_out(self, place: _Place, turn: int, moment: float) -> None:
        if place.turn == turn and isinstance(place.waits, Rest):
            self._go_on(place, moment, None)

    def _send(self, sender: _Place, message: Send, moment: float) -> None:
        self.messages += 1
        self.bytes_sent += message.size_bytes
        leaves = max(moment, sender.link_free) + self.network.per_byte * message.size_bytes
        sender.link_free = leaves
        arrives = leaves + self.network.latency + self.costs.wake / 2
        self.at(arrives, lambda: self._read(sender.actor.rank, message))

    def _read(self, source: int, message: Send) -> None:
        """The thread that reads the socket: one message after the other."""
        place = self._places[message.to]
        handle = self.costs.handle_more if place.reader_free > self.now else self.costs.handle
        place.reader_free = end = self.compute(max(self.now, place.reader_free), handle(message.size_bytes))
        self.at(end, lambda: self._deliver(place, source, message))

    def _deliver(self, place: _Place, source: int, message: Send) -> None:
        queue = place.arrived.setdefault(source, deque())
        queue.append((self.now, message.content, message.size_bytes))
        if isinstance(place.waits, Receive):
            self._take(place)

    def _take(self, place: _Place) -> None:
        """Give an actor the message it waits for, if that is there."""
        assert isinstance(place.waits, Receive)
        queue = place.arrived.get(place.waits.source)
        if queue:
            arrived, content, size = queue.popleft()
            place.waits = None
            slept = arrived > place.since
            ready = arrived + self.costs.wake / 2 if slept else place.since
            finish = (self.costs.finish if slept else self.costs.finish_ready)(size)
            self.at(ready, lambda: self._go_on(place, ready, content, finish))


Pattern = Generator[Spent | Send | Receive, None, None]


class PatternActor:
    """An actor that follows a written pattern of messages, such as a textbook's algorithm."""

    def __init__(self, rank: int, pattern: Pattern, costs: MessageCosts) -> None:
        self.rank = rank
        self.ended = 0.0
        self._pattern = pattern
        self._costs = costs

    def go_on(self, content: Any) -> tuple[list[Spent | Send], Receive | Rest | None]:
        did: list[Spent | Send] = []
        for step in self._pattern:
            if isinstance(step, Receive):
                did.append(Spent(self._costs.receive(0)))
                return did, step
            did.append(step)
        return did, None

    def has_run(self, until: float) -> None:
        self.ended = until


def seconds_of(patterns: Sequence[Pattern], costs: MessageCosts, network: Network) -> float:
    """Until the last of the workers has come to the end of its pattern."""
    simulation = Simulation(costs, network)
    actors = [PatternActor(rank, pattern, costs) for rank, pattern in enumerate(patterns)]
    for actor in actors:
        simulation.add(actor)
    simulation.run()
    return max(actor.ended for actor in actors)
