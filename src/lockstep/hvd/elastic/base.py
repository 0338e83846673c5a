"""What survives a change of workers: the base of all states, and the state of plain Python objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Any

from lockstep.errors import StoppedError
from lockstep.hvd.engine import current as horovod
from lockstep.hvd.exceptions import HostsUpdatedInterrupt
from lockstep.world.elastic_rendezvous import ADDED, REMOVED


class HostUpdateResult(IntFlag):
    """What has happened to the hosts of an elastic job."""

    no_update = 0
    removed = REMOVED
    added = ADDED
    mixed = REMOVED | ADDED


class Commits:
    """Where commits are kept beyond this process: nowhere. Also the base of what keeps them."""

    def keep(self, state: State) -> None:
        """Keep what the state has saved."""

    def bring_back(self, state: State) -> bool:
        """Called by all workers before they synchronise; whether the state is now that of a commit from before."""
        return False

    def must_stop(self) -> bool:
        """Whether this worker was asked to end at a commit, for a start with other hosts."""
        return False


@dataclass(frozen=True)
class _HostMessages:
    is_empty: bool

    def empty(self) -> bool:
        return self.is_empty


class State:
    """Training state that is saved, restored, and made the same on all workers. Subclasses say what it consists of.

    Args:
        bcast_object: Gives every worker rank 0's object.
        get_rank: Gives this worker's rank.
    """

    _commits = Commits()  # for subclasses that do not call __init__, too

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._get_rank = get_rank
        self._changes_seen = 0
        self._messages: deque[tuple[float, int]] = deque()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call, in order, when the workers have changed: after init, before the state is synchronised.

        The place to scale a learning rate by the new `size()`.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The workers have changed: fit the state to them and call the registered functions."""
        self._messages.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell this worker of a change of the hosts that the launcher does not know of; any thread may call it.

        Rank 0's counts: at its next `commit` or `check_host_updates` all workers meet again.

        Args:
            timestamp: When it was, in seconds; one that is not later than what was told before is old news.
            update_res: A `HostUpdateResult`.
        """
        self._messages.append((timestamp, update_res))

    @property
    def _host_messages(self) -> _HostMessages:
        """Horovod's queue of news of the hosts, for scripts that ask whether it is empty."""
        from lockstep.world.elastic_rendezvous import host_changes

        return _HostMessages(not self._messages and not host_changes(self._changes_seen)[1])

    def commit(self) -> None:
        """Save the state, also in the host's memory where the workers can be started anew; then look for other hosts.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed; on every worker.
            HorovodInternalError: A worker was lost, and the state may hold part of a sum: the last copy remains.
            SystemExit: They have, and all workers are started anew.
        """
        self._keep()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """See whether the hosts have changed, by rank 0's knowledge, so that all workers find the same.

        Raises:
            HostsUpdatedInterrupt: They have; on every worker.
            SystemExit: They have, and all workers are started anew, with the state as it is now.
        """
        news = self._news() if self._get_rank() == 0 else None
        must_stop = self._commits.must_stop()
        self._changes_seen, changes, must_stop = self._bcast_object((*news, must_stop) if news else None)
        if must_stop:
            self._keep()
            stop()
        if changes:
            raise HostsUpdatedInterrupt(skip_sync=changes == REMOVED)

    def _news(self) -> tuple[int, int]:
        """The number of the launcher's latest change of the hosts, and what has changed since the last look."""
        from lockstep.world.elastic_rendezvous import host_changes

        seen, changes = host_changes(self._changes_seen)
        while self._messages:
            timestamp, update = self._messages.popleft()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                changes |= update
        return seen, changes

    def _keep(self) -> None:
        """Save the state once it is whole; before, an accelerator may still be waiting for a worker that is gone."""
        if horovod.context is not None:
            horovod.context.settle()
        self.save()
        self._commits.keep(self)

    def keep_in(self, commits: Commits) -> None:
        """Keep commits there from now on."""
        self._commits = commits

    def get_saved(self) -> Any:
        """The copy that was saved, for workers that are started anew: anything that cloudpickle takes.

        Raises:
            NotImplementedError: The class does not say; its state is lost with all workers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_saved and set_saved")

    def set_saved(self, saved: Any) -> None:
        """Take over such a copy, for `restore`."""
        raise NotImplementedError(f"{type(self).__name__} has no get_saved and set_saved")

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Fit the state to a changed number of workers."""


class ObjectState(State):
    """Plain Python objects: each keyword argument becomes an attribute, saved as a deep copy and sent by pickle."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        self._set_attributes(kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def save(self) -> None:
        self._saved_state = copy.deepcopy(self._attributes())

    def restore(self) -> None:
        self._set_attributes(copy.deepcopy(self._saved_state))

    def get_saved(self) -> Any:
        return self._saved_state

    def set_saved(self, saved: Any) -> None:
        self._saved_state = saved

    def sync(self) -> None:
        if self._saved_state:
            self._set_attributes(self._bcast_object(self._attributes()))
            ObjectState.save(self)  # what a subclass adds may not be synchronised yet

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attributes(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def stop() -> None:
    """End this worker, as one that is to be started anew.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(StoppedError.exit_code)
