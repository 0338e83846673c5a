"""The stall report: which tensors wait, for which ranks, since when.

A worker that waits in a round cannot learn there what the others lack. So each worker with a request that has been
pending for too long says so in the job's store, and the lowest of these ranks reads what the others said and warns.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.settings import Settings

JOINED = "join.all"  # the name of join's request
logger = logging.getLogger("lockstep.hvd")


class StallWatch:
    """Looks at the pending requests now and then, in a thread of its own.

    Args:
        store: The job's store.
        channels: Gives the channels of this worker, by the id of their process set.
        stop: Called with a reason when something has waited for longer than the limit that ends the job.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        settings: Settings,
        channels: Callable[[], dict[int, Channel]],
        stop: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._warning_seconds = settings.stall_warning_seconds
        self._limit_seconds = settings.stall_shutdown_seconds
        self._channels = channels
        self._stop = stop
        self._ended = threading.Event()
        self._told: dict[int, list[str]] = {}  # by process set, what the store says of this worker
        self._looks: dict[int, dict[str, int]] = {}  # by process set, how often a name was found stalled
        self._thread = threading.Thread(target=self._watch, name="lockstep-hvd-stall", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _watch(self) -> None:
        interval = min(max(self._warning_seconds / 10, 0.05), 5.0)
        repeat = max(3, round(self._warning_seconds / interval))
        own_connection = False  # since another thread may wait on the store
        while not self._ended.wait(interval):
            try:
                if not own_connection:
                    self._store, own_connection = self._store.clone(), True
                for number, channel in self._channels().items():
                    self._tell(number, sorted(channel.pending_since(interval)))
                    self._warn(number, channel, repeat)
            except RuntimeError:  # the store is gone, and with it the job
                return

    def _tell(self, number: int, names: list[str]) -> None:
        if names != self._told.get(number, []):
            self._told[number] = names
            self._store.set(f"pending/{number}/{self._rank}", json.dumps(names))

    def _warn(self, number: int, channel: Channel, repeat: int) -> None:
        """Warn of what is stalled, at the second look, when the others have told, too, and then now and again.

        What would end the job at the first look is warned of before it does.
        """
        stalled = channel.pending_since(self._warning_seconds)
        stalled.pop(JOINED, None)
        before = self._looks.get(number, {})
        self._looks[number] = looks = {name: before.get(name, 0) + 1 for name in stalled}
        oldest = max(stalled.values(), default=0.0)
        ends = 0 < self._limit_seconds <= oldest
        due = [name for name, count in looks.items() if count % repeat == 2 or (ends and count == 1)]
        if due:
            told = {rank: self._read(number, rank) for rank in channel.ranks}
            for name in due:
                having = [rank for rank, names in told.items() if name in names]
                missing = [rank for rank, names in told.items() if name not in names and JOINED not in names]
                if self._rank == min(having, default=self._rank):
                    logger.warning(_report(name, stalled[name], having, missing))
        if ends:
            name = max(stalled, key=lambda name: stalled[name])
            self._stop(f"{name} has been pending for {oldest:.0f} s, longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")

    def _read(self, number: int, rank: int) -> list[str]:
        key = f"pending/{number}/{rank}"
        return list(json.loads(self._store.get(key))) if self._store.check([key]) else []


def _report(name: str, age_seconds: float, having: Sequence[int], missing: Sequence[int]) -> str:
    return (
        f"Stalled: {name} has waited for {age_seconds:.0f} s. Missing ranks: {_listed(missing)}. Submitted by ranks: "
        f"{_listed(having)}. All ranks of a process set must submit the same operations under the same names."
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
