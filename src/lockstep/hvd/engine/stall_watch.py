"""Reports requests that stall while a job runs.

A worker that waits in a round cannot see its peers' pending requests. So each worker writes the names of its overdue
requests to the job's store, without a collective, and the lowest rank that submitted a stalled request reads them and
logs a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.settings import Settings

logger = logging.getLogger("lockstep.hvd")


JOINED = "join.all"  # the name of join's request
RULE = "All ranks of a process set must submit the same operations under the same names."


class StallWatch:
    """Checks the pending requests.

    Args:
        channels: Returns this worker's channels by process set id.
        stop: Called with a reason when a request exceeds HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
    """

    def __init__(
        self, rank: int, settings: Settings, channels: Callable[[], dict[int, Channel]], stop: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._warning_seconds = settings.stall_warning_seconds
        self._limit_seconds = settings.stall_shutdown_seconds
        self._channels = channels
        self._stop = stop
        self._published: dict[int, list[str]] = {}  # by process set, the names this worker wrote to the store
        self._counts: dict[int, dict[str, int]] = {}  # by process set, how many checks found a name stalled
        self.interval_seconds = min(max(self._warning_seconds / 10, 0.05), 5.0)
        self._repeat = max(3, round(self._warning_seconds / self.interval_seconds))

    def check(self, store: Any) -> None:
        """Write this worker's overdue requests to the store, and log those that are stalled."""
        for number, channel in self._channels().items():
            self._publish(store, number, sorted(channel.pending_since(self.interval_seconds)))
            self._warn(store, number, channel)

    def _publish(self, store: Any, number: int, names: list[str]) -> None:
        if names != self._published.get(number, []):
            self._published[number] = names
            store.set(f"pending/{number}/{self._rank}", json.dumps(names))

    def _warn(self, store: Any, number: int, channel: Channel) -> None:
        """Log stalled requests.

        A request is logged when a check finds it stalled for the second time, since by then the peers have published
        theirs too, and again after every `_repeat` checks. If it ends the job at the first check, it is logged then.
        """
        stalled = channel.pending_since(self._warning_seconds)
        stalled.pop(JOINED, None)
        before = self._counts.get(number, {})
        self._counts[number] = counts = {name: before.get(name, 0) + 1 for name in stalled}
        oldest = max(stalled.values(), default=0.0)
        ends = 0 < self._limit_seconds <= oldest
        due = [name for name, count in counts.items() if count % self._repeat == 2 or (ends and count == 1)]
        if not due and not ends:
            return
        pending = {rank: _read(store, number, rank) for rank in channel.ranks}
        pending[self._rank] += stalled
        for name in due:
            having, ranks = _having(name, pending)
            if self._rank == min(having):
                logger.warning(f"Stalled: {name} has waited for {stalled[name]:.0f} s. {ranks} {RULE}")
        if ends:
            name = max(stalled, key=lambda name: stalled[name])
            limit = "longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
            self._stop(f"{name} has been pending for {oldest:.0f} s, {limit}. {_having(name, pending)[1]}")


def _read(store: Any, number: int, rank: int) -> list[str]:
    key = f"pending/{number}/{rank}"
    return list(json.loads(store.get(key))) if store.check([key]) else []


def _having(name: str, pending: dict[int, list[str]]) -> tuple[list[int], str]:
    """Return the ranks that have submitted a request, and a text with these and the missing ranks."""
    having = [rank for rank, names in pending.items() if name in names]
    missing = [rank for rank, names in pending.items() if name not in names and JOINED not in names]
    return having, f"Missing ranks: {_listed(missing)}. Submitted by ranks: {_listed(having)}."


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
