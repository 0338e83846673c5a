"""The loop around an elastic training function: synchronise, train, and after a change of workers, once more."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lockstep.hvd.basics import init, is_initialized, shutdown
from lockstep.hvd.elastic.base import State
from lockstep.hvd.elastic.commits import open_commits
from lockstep.hvd.engine import current as horovod
from lockstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.hvd.ops.functions import allgather_object

Training = TypeVar("Training", bound=Callable[..., Any])

log = logging.getLogger(__name__)
_runs = itertools.count()  # of elastic functions, in the same order in every worker


def run(func: Training) -> Training:
    """Decorator: make a training function, whose first argument is its `State`, go on when workers come and go.

    Every worker synchronises the state and calls the function. Where a worker was lost (HorovodInternalError), the
    state goes back to the last commit; where hosts were added or removed (HostsUpdatedInterrupt, from `commit` or
    `check_host_updates`), it stays as it is. Then Horovod is initialised anew and all starts over. Other exceptions
    of the function are the caller's.

    Where the launcher starts all workers anew after a failure (`lockstep run --max-restarts`, `horovodrun --min-np`
    over several hosts), the state begins with the last commit that any host has kept, as after a loss in place.
    """
    return run_fn(func, _reset)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """`run` with a function of the caller's own that joins the new group of workers."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        workers_changed, must_sync = False, True
        commits = open_commits(next(_runs))
        state.keep_in(commits)
        while True:
            try:
                if workers_changed:
                    reset()
                if commits.bring_back(state) or workers_changed:
                    state.on_reset()
                if _any_worker(must_sync):
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                log.warning("back to the last commit, with the workers that there are now: %s", error)
                if horovod.context is not None:
                    horovod.context.end_device_work()
                state.restore()
                must_sync = True
            except HostsUpdatedInterrupt as interrupt:
                log.info("the hosts have changed: going on with the workers that there are now")
                must_sync = not interrupt.skip_sync
            workers_changed = True

    return cast(Training, wrapper)


def _any_worker(must_sync: bool) -> bool:
    """Whether any worker must synchronise: one that has just started needs the state of those who could do without."""
    return any(allgather_object(must_sync)) if is_initialized() else must_sync


def _reset() -> None:
    """Join the new group of workers."""
    shutdown()
    init()
