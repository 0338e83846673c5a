"""What a running Horovod of this process consists of: its place, its connections, its process sets."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.connections import Links
from lockstep.hvd.engine.control import Control
from lockstep.hvd.engine.process_groups import gloo_group
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.stall import StallWatch
from lockstep.hvd.engine.timeline import Timeline
from lockstep.world.launcher_environment import Place
from lockstep.world.lifeline import Lifeline
from lockstep.world.start_limit import START_TIMEOUT, load_here

SHUT_DOWN = "Horovod has been shut down."
PATIENCE_SECONDS = 5.0  # for what is under way at a shutdown
DEVICE_PATIENCE_SECONDS = 15.0  # for the news of a loss, a look at the device, and an abort
LOSS_PATIENCE_SECONDS = 2.0  # after another worker is lost


@dataclass(frozen=True)
class Neighbours:
    """Where the workers are, as all of them said: by rank, the local rank and the local size."""

    local_ranks: tuple[int, ...]
    local_sizes: tuple[int, ...]

    def cross(self, rank: int) -> tuple[int, int]:
        """Rank and size among the workers with the same local rank, in order of rank."""
        peers = [other for other, local in enumerate(self.local_ranks) if local == self.local_ranks[rank]]
        return peers.index(rank), len(peers)

    @property
    def homogeneous(self) -> bool:
        return len(set(self.local_sizes)) == 1


class Context:
    """The connections of this worker from `init` to `shutdown`.

    Args:
        store: The job's store under a prefix of this initialisation's own.
        launched: How many workers the launcher has started, of which `place` may count a part.
    """

    def __init__(self, place: Place, store: Any, settings: Settings, launched: int) -> None:
        self.place = place
        self.launched = launched
        self.settings = settings
        self.timeline = Timeline()
        self._store = store
        self._lock = threading.Lock()
        self.channels: dict[int, Channel] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._optimizers: dict[int, Iterator[int]] = {}
        self._news: list[tuple[int, bool, str]] = []  # who has ended, whether it was lost, and that in words
        self._lifeline: Lifeline | None = None
        self._stall: StallWatch | None = None
        self.neighbours = Neighbours((place.local_rank,), (place.local_size,))

    def connect(self) -> None:
        """Find the other workers, and open the channel of all.

        Raises:
            WorldError: Some did not come within the time, or cannot be reached; the message names them.
            RuntimeError: The job's store is gone.
        """
        place, settings = self.place, self.settings
        if place.size > 1:
            self._wait_for_all()
            self._introduce()
            self._lifeline = Lifeline(
                self._store, place.rank, place.size, settings.gloo_timeout_seconds, self._one_host, self._ended
            )
        elif self.launched > 1:  # counted alone; an elastic job's only worker keeps its slot
            self.place = replace(place, local_rank=0, local_size=1)
        self.open_channel(0, range(place.size))
        if place.size > 1 and settings.stall_check and settings.stall_warning_seconds > 0:
            self._stall = StallWatch(self._store, place.rank, settings, self._channels, self.fail)

    @property
    def broken(self) -> bool:
        """Whether the connection to all workers could not be made, or has ended."""
        channel = self.channels.get(0)
        return channel is None or channel.is_closed

    def _wait_for_all(self) -> None:
        """Wait for all workers, and name those that do not come."""
        place, timeout = self.place, timedelta(seconds=self.settings.start_timeout_seconds)
        self._store.set(f"here/{place.rank}", socket.gethostname())
        try:
            self._store.wait([f"here/{rank}" for rank in range(place.size)], timeout)
        except RuntimeError as error:
            missing = [rank for rank in range(place.size) if not self._store.check([f"here/{rank}"])]
            raise WorldError(
                f"worker {place.rank} on {socket.gethostname()} waited {timeout.total_seconds():g} s for the workers "
                f"{missing} of {place.size} to call hvd.init(): they are still importing or reading data, or failed "
                f"({load_here()}); set {START_TIMEOUT} to wait longer"
            ) from error

    def _introduce(self) -> None:
        """Tell the others where this worker is, and hear where they are; take what must be the same from rank 0."""
        place = self.place
        node = f"{place.node} {socket.gethostname()}"
        said = [place.local_rank, place.local_size, node, self.settings.fusion_threshold_bytes]
        self._store.set(f"place/{place.rank}", json.dumps(said))
        replies = [json.loads(self._store.get(f"place/{rank}")) for rank in range(place.size)]
        local_ranks, local_sizes, nodes, thresholds = zip(*replies, strict=True)
        if place.size < self.launched or place.launcher == "none":  # counted among these workers, by host
            local_sizes = tuple(nodes.count(node) for node in nodes)
            local_ranks = tuple(nodes[:rank].count(node) for rank, node in enumerate(nodes))
            self.place = replace(place, local_rank=local_ranks[place.rank], local_size=local_sizes[place.rank])
        self.neighbours = Neighbours(local_ranks, local_sizes)
        self.settings = replace(self.settings, fusion_threshold_bytes=thresholds[0])

    def open_channel(self, number: int, ranks: Sequence[int]) -> Channel | None:
        """Connect the workers of a process set, each of which calls this; None on a worker outside it."""
        if self.place.rank not in ranks:
            return None
        rank, size = list(ranks).index(self.place.rank), len(ranks)
        group = self._group(f"set{number}", ranks) if size > 1 else None
        links = Links(group, dist.PrefixStore(f"links{number}", self._store), rank, size)
        channel = Channel(ranks, Control(group, rank, size), links, self.settings, self.timeline, self._failed)
        with self._lock:
            self.channels[number] = channel
            for ended, lost, reason in self._news:
                if lost or ended in channel.ranks:
                    channel.close(reason, lost)
        return channel

    def close_channel(self, number: int, reason: str) -> None:
        with self._lock:
            channel = self.channels.pop(number, None)
        if channel is not None:
            channel.close(reason)
            channel.wait_for_end(PATIENCE_SECONDS)

    def count(self, kind: str, number: int) -> int:
        """How many nameless operations of a kind there were in a process set; the same on all its workers."""
        with self._lock:
            count = self._counts.get((kind, number), 0)
            self._counts[kind, number] = count + 1
        return count

    def restart_counts(self, number: int) -> None:
        """Count nameless operations of a process set from 0 again, where its workers may have had several numbers."""
        with self._lock:
            self._counts = {key: count for key, count in self._counts.items() if key[1] != number}

    def count_optimizer(self, number: int) -> int:
        """How many distributed optimizers there were for a process set; the same on all its workers."""
        with self._lock:
            return next(self._optimizers.setdefault(number, itertools.count()))

    def fail(self, reason: str) -> None:
        """Fail everything that is pending and everything that comes."""
        self._close(list(self._channels().values()), reason, LOSS_PATIENCE_SECONDS, lost=True)

    def settle(self) -> None:
        """Wait until the accelerator has done what it was asked for.

        Raises:
            HorovodInternalError: A collective has failed, so that what was computed since may be wrong.
        """
        for channel in self._channels().values():
            channel.settle()

    def end_device_work(self) -> None:
        """After a failure, before anything that collectives may still write to is given another value."""
        for channel in self._channels().values():
            channel.end_device_work(DEVICE_PATIENCE_SECONDS)

    def shut_down(self) -> None:
        """Disconnect; pending requests fail, here and, when they notice, on the other workers."""
        if self._stall is not None:
            self._stall.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._close(list(self._channels().values()), SHUT_DOWN, PATIENCE_SECONDS, lost=False)
        self._stall = self._lifeline = None  # they refer to this object, too
        self.timeline.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, so that its end is seen although the child lives."""
        if self._lifeline is not None:
            self._lifeline.abandon()

    def _close(self, channels: Sequence[Channel], reason: str, patience_seconds: float | None, lost: bool) -> None:
        """Close channels; what is under way has some time to come to its end, or all it needs, and then fails."""
        for channel in channels:
            channel.close(reason, lost)
        if patience_seconds is not None:
            deadline = time.monotonic() + patience_seconds
            for channel in channels:
                channel.wait_for_end(max(0.0, deadline - time.monotonic()))

    def _failed(self) -> None:
        if self._lifeline is not None:
            self._lifeline.report_failure()

    def _channels(self) -> dict[int, Channel]:
        with self._lock:
            return dict(self.channels)

    def _ended(self, rank: int, lost: bool) -> None:
        """Another worker has ended; called by the lifeline."""
        how = (
            "was lost: its process has ended or its host cannot be reached"
            if lost
            else "has shut down, by hvd.shutdown() or because its script has ended"
        )
        reason = f"Horovod has been shut down, because rank {rank} {how}."
        with self._lock:
            self._news.append((rank, lost, reason))
            affected = [channel for channel in self.channels.values() if lost or rank in channel.ranks]
        # What is under way with a worker that has finished can still come to its end.
        self._close(affected, reason, LOSS_PATIENCE_SECONDS if lost else None, lost)

    @property
    def _one_host(self) -> bool:
        return self.place.local_size == self.place.size

    def _group(self, name: str, ranks: Sequence[int]) -> Any:
        """A Gloo group of some workers."""
        place = self.place
        return gloo_group(
            dist.PrefixStore(name, self._store),
            list(ranks).index(place.rank),
            len(ranks),
            self.settings.gloo_timeout_seconds,
            self._one_host,
        )
