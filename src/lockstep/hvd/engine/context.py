"""The state of Horovod in this process between `init` and `shutdown`: rank info, connections, process sets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lockstep.diagnosis import publisher
from lockstep.diagnosis.group_watch import StoreWatch, watched_by_launcher
from lockstep.errors import WorldError
from lockstep.hvd.engine.channel import Channel
from lockstep.hvd.engine.settings import Settings
from lockstep.hvd.engine.timeline import Timeline
from lockstep.hvd.engine.transfers import SetConnections, gloo_group
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import START_TIMEOUT, exchange, load_here
from lockstep.world.step_clock import StepClock

if TYPE_CHECKING:
    from lockstep.world.peer_loss import Lifeline

OPTIMIZER = "optimizer"  # the kind of what `Context.count` numbers beside operations
SHUT_DOWN = "Horovod has been shut down."
PATIENCE_SECONDS = 5.0  # for collectives in progress at shutdown
DEVICE_PATIENCE_SECONDS = 15.0  # for the report of a disconnected worker, a check of the device, and an abort
LOSS_PATIENCE_SECONDS = 2.0  # for collectives in progress after a worker disconnected


class Context:
    """The connections of this worker from `init` to `shutdown`.

    Args:
        store: The job's store, with a prefix unique to this initialization.
        launched: How many workers the launcher started; `rank_info.size` can be smaller.
    """

    def __init__(self, rank_info: RankInfo, store: Any, settings: Settings, launched: int) -> None:
        self.rank_info = rank_info
        self.launched = launched
        self.settings = settings
        self.timeline = Timeline()
        self.step_times = StepClock()  # until `connect`
        self._is_observing = False  # whether it observes this process, since no launcher does
        self._store = store
        self._lock = threading.Lock()
        self.channels: dict[int, Channel] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self.joins = 0  # how often all workers have joined
        self.is_inherited = False  # from the parent process, by a forked child, which has no connections
        self._news: list[tuple[int, bool, str]] = []  # rank, whether it disconnected, reason
        self._lifeline: Lifeline | None = None
        self._store_watch: StoreWatch | None = None
        self.local_ranks = (rank_info.local_rank,)  # by rank
        self.local_sizes = (rank_info.local_size,)  # by rank

    def connect(self) -> None:
        """Wait for the other workers and open the global process set's channel.

        Raises:
            WorldError: Some did not start within the timeout, or are unreachable; the message lists them.
            RuntimeError: The job's store is closed.
        """
        rank_info, settings = self.rank_info, self.settings
        publisher.start()
        if rank_info.size > 1:
            self._observe_steps()
            with publisher.joining():
                self._wait_for_all()
            self._exchange_rank_info()
            from lockstep.world.peer_loss import Lifeline

            self._lifeline = Lifeline(
                self._store, rank_info.rank, rank_info.size, settings.gloo_timeout_seconds, self._one_host, self._ended
            )
        elif self.launched > 1:  # the only worker in `comm`; an elastic job's only worker keeps its slot
            self.rank_info = replace(rank_info, local_rank=0, local_size=1)
        self.open_channel(0, range(rank_info.size))
        if rank_info.size > 1 and settings.stall_check and settings.stall_warning_seconds > 0:
            from lockstep.hvd.engine.stall_watch import StallWatch

            stalls = StallWatch(rank_info.rank, settings, self._channels, self.fail)
            self._store_watch = StoreWatch(self._store, stalls.check, stalls.interval_seconds)
        publisher.set_source(self._pending)

    def _observe_steps(self) -> None:
        """Observe this process if no launcher does, and use the clock of its steps."""
        if self.settings.straggler_seconds <= 0:
            return
        from lockstep.world import autoload, observer

        if not watched_by_launcher():
            self._is_observing = autoload.observation().join(self._store, self.rank_info.rank, self.rank_info.size)
        if observer.current:
            self.step_times = observer.current.clock

    def _pending(self) -> list[str]:
        """Return the names of this worker's unfinished operations, the oldest first."""
        ages: dict[str, float] = {}
        for channel in self._channels().values():
            ages |= channel.pending_since(0.0)
        return sorted(ages, key=lambda name: -ages[name])

    @property
    def broken(self) -> bool:
        """Whether the global process set is not connected."""
        return self.channels[0].is_closed

    def _wait_for_all(self) -> None:
        """Wait until all workers have called `init`.

        Raises:
            WorldError: Some did not within the timeout; the message lists them.
        """
        rank_info, timeout = self.rank_info, timedelta(seconds=self.settings.start_timeout_seconds)
        self._store.set(f"here/{rank_info.rank}", socket.gethostname())
        try:
            self._store.wait([f"here/{rank}" for rank in range(rank_info.size)], timeout)
        except RuntimeError as error:
            missing = [rank for rank in range(rank_info.size) if not self._store.check([f"here/{rank}"])]
            raise WorldError(
                f"worker {rank_info.rank} on {socket.gethostname()} waited {timeout.total_seconds():g} s for the "
                f"workers {missing} of {rank_info.size} to call hvd.init(): they are still importing or reading data, "
                f"or failed ({load_here()}); to wait longer, set {START_TIMEOUT}"
            ) from error

    def _exchange_rank_info(self) -> None:
        """Exchange rank info with the other workers; take settings that must be the same from rank 0."""
        rank_info = self.rank_info
        node = f"{rank_info.node} {socket.gethostname()}"
        shared = {name: getattr(self.settings, name) for name in ("fusion_threshold_bytes", "check_replicas")}
        own = [rank_info.local_rank, rank_info.local_size, node, shared]
        replies = exchange(self._store, rank_info.rank, rank_info.size, own)
        local_ranks, local_sizes, nodes, settings = zip(*replies, strict=True)
        if rank_info.size < self.launched or rank_info.launcher == "none":  # renumber by host
            local_sizes = tuple(nodes.count(node) for node in nodes)
            local_ranks = tuple(nodes[:rank].count(node) for rank, node in enumerate(nodes))
            self.rank_info = replace(
                rank_info, local_rank=local_ranks[rank_info.rank], local_size=local_sizes[rank_info.rank]
            )
        self.local_ranks, self.local_sizes = local_ranks, local_sizes
        self.settings = replace(self.settings, **settings[0])

    def open_channel(self, number: int, ranks: Sequence[int]) -> None:
        """Connect the workers of a process set (collective); do nothing on workers outside it."""
        if self.rank_info.rank not in ranks:
            return
        rank, size = list(ranks).index(self.rank_info.rank), len(ranks)
        group = None
        if size > 1:
            store = dist.PrefixStore(f"set{number}", self._store)
            group = gloo_group(store, rank, size, self.settings.gloo_timeout_seconds, self._one_host)
        links = SetConnections(group, dist.PrefixStore(f"links{number}", self._store), ranks, rank)
        channel = Channel(links, self.settings, self.timeline, self.step_times, self._failed)
        with self._lock:
            self.channels[number] = channel
            for ended, lost, reason in self._news:
                if lost or ended in channel.ranks:
                    channel.close(reason, lost)

    def close_channel(self, number: int, reason: str) -> None:
        with self._lock:
            channel = self.channels.pop(number, None)
        if channel is not None:
            channel.close(reason)
            channel.wait_for_end(PATIENCE_SECONDS)

    def count(self, kind: str, number: int) -> int:
        """Return the next number for an unnamed operation of a kind, or for a distributed optimizer, in a process set.

        Numbers start at 0 and are equal on all workers.
        """
        with self._lock:
            count = self._counts.get((kind, number), 0)
            self._counts[kind, number] = count + 1
        return count

    def restart_counts(self) -> None:
        """Restart the numbering of unnamed operations in the global process set, after it may have diverged."""
        with self._lock:
            self._counts = {key: count for key, count in self._counts.items() if key[1] or key[0] == OPTIMIZER}

    def fail(self, reason: str) -> None:
        """Fail all pending and all later requests."""
        self._close(list(self._channels().values()), reason, LOSS_PATIENCE_SECONDS, lost=True)

    def settle(self) -> None:
        """Wait until the accelerator has finished all queued work.

        Raises:
            HorovodInternalError: A collective failed, so later results may be wrong.
        """
        for channel in self._channels().values():
            channel.settle()

    def end_device_work(self, before_exit: Callable[[], None] = lambda: None) -> None:
        """After a failure, wait until no collective can still write to a tensor; call this before restoring any."""
        for channel in self._channels().values():
            channel.end_device_work(DEVICE_PATIENCE_SECONDS, before_exit)

    def shut_down(self) -> None:
        """Disconnect; pending requests fail, on this worker and soon on the others."""
        publisher.set_source(None)
        if self._is_observing:
            from lockstep.world import autoload

            autoload.observation().leave()
            self._is_observing = False
        if self._store_watch is not None:
            self._store_watch.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._close(list(self._channels().values()), SHUT_DOWN, PATIENCE_SECONDS, lost=False)
        self._store_watch = self._lifeline = None  # they reference this object
        self.timeline.close()

    def abandon(self) -> None:
        """In a forked child, keep only what is known about this worker.

        Copies of the connections are closed, so that peers notice when the parent exits.
        """
        if self._lifeline is not None:
            self._lifeline.abandon()
        self.is_inherited = True
        self.channels, self.timeline, self._lock = {}, Timeline(), threading.Lock()
        self._store = self._store_watch = self._lifeline = None

    def _close(self, channels: Sequence[Channel], reason: str, patience_seconds: float | None, lost: bool) -> None:
        """Close channels; requests in progress get `patience_seconds` to finish (None: no limit) before they fail."""
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
        """Close the channels that another worker's exit affects; called by the lifeline."""
        how = (
            "disconnected: its process exited or its host is unreachable"
            if lost
            else "called hvd.shutdown(), or its script ended"
        )
        reason = f"Horovod has been shut down, because rank {rank} {how}."
        with self._lock:
            self._news.append((rank, lost, reason))
            affected = [channel for channel in self.channels.values() if lost or rank in channel.ranks]
        # Collectives in progress can still finish if the worker shut down cleanly.
        self._close(affected, reason, LOSS_PATIENCE_SECONDS if lost else None, lost)

    @property
    def _one_host(self) -> bool:
        return self.rank_info.local_size == self.rank_info.size


current: Context | None = None
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
INHERITED = (
    "Process {pid} was forked from rank {rank}, as a DataLoader's worker is, and has no connections: only the process "
    "that called hvd.init() can communicate. hvd.rank(), hvd.size() and similar functions work in both."
)


def get(connected: bool = False) -> Context:
    """Return the current context; `connected`: for what needs connections.

    Raises:
        ValueError: Horovod is not initialized, or not connected in a forked process.
    """
    if current is None:
        raise ValueError(NOT_INITIALIZED)
    if connected and current.is_inherited:
        raise ValueError(INHERITED.format(pid=os.getpid(), rank=current.rank_info.rank))
    return current


def get_for_operation() -> Context:
    """Return the current context, for a collective.

    Raises:
        HorovodInternalError: Horovod is not initialized, or not connected in a forked process.
    """
    try:
        return get(connected=True)
    except ValueError as error:
        raise HorovodInternalError(str(error)) from None
