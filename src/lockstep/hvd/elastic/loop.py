"""The loop around an elastic training function: synchronize, train, and repeat after a change of workers."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lockstep.hvd.basics import init, is_initialized, shutdown
from lockstep.hvd.elastic.commits import open_commits
from lockstep.hvd.elastic.state import State
from lockstep.hvd.engine import context as engine
from lockstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.hvd.ops.functions import allgather_object

Training = TypeVar("Training", bound=Callable[..., Any])

log = logging.getLogger(__name__)
_runs = itertools.count()  # of elastic functions, in the same order in every worker


def run(func: Training) -> Training:
    """Decorate a training function, whose first argument is its `State`, so that it continues when workers change.

    All workers synchronize the state and call the function. If a worker disconnects (HorovodInternalError), the state
    is restored from the last commit. If hosts are added or removed (HostsUpdatedInterrupt, from `commit` or
    `check_host_updates`), the state stays as it is. In both cases, Horovod is initialized again and the function is
    called again. Other exceptions propagate.

    If the launcher restarts all workers after a failure (`lockstep run --max-restarts`, `horovodrun --min-np` on
    several hosts), the state is first restored from the newest commit on any host.
    """
    return run_fn(func, _reset)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Like `run`, with a custom function `reset` that connects to the new workers."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        workers_changed, must_sync = False, True
        commits = open_commits(next(_runs))
        state.keep_in(commits)
        while True:
            try:
                if workers_changed:
                    reset()
                if commits.restore_newest(state) or workers_changed:
                    state.on_reset()
                if _any_worker(must_sync):
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                log.warning("restoring the last commit and continuing with the remaining and new workers: %s", error)
                if engine.current is not None:
                    engine.current.end_device_work()
                state.restore()
                must_sync = True
            except HostsUpdatedInterrupt as interrupt:
                log.info("the hosts have changed; continuing with the current workers")
                must_sync = not interrupt.skip_sync
            workers_changed = True

    return cast(Training, wrapper)


def _any_worker(must_sync: bool) -> bool:
    """Return whether any worker must synchronize, since new workers need the state of the others (collective)."""
    return any(allgather_object(must_sync)) if is_initialized() else must_sync


def _reset() -> None:
    """Connect to the new workers."""
    shutdown()
    init()
