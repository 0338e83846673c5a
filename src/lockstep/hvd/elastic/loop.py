"""The loop around an elastic training function: synchronize, train, and repeat after a change of workers."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lockstep.errors import WorldError
from lockstep.hvd.basics import init, is_initialized, shutdown
from lockstep.hvd.elastic import commits
from lockstep.hvd.elastic.state import State
from lockstep.hvd.engine import context as engine
from lockstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from lockstep.hvd.ops.functions import allgather_object
from lockstep.world import NODE_PROCESS, accelerator, generations

Training = TypeVar("Training", bound=Callable[..., Any])

log = logging.getLogger(__name__)
_calls = itertools.count(1)


def run(func: Training) -> Training:
    """Decorate a training function, whose first argument is its `State`, so that it continues when workers change.

    All workers synchronize the state and call the function. If a worker disconnects (HorovodInternalError), the state
    is restored from the last commit. If hosts are added or removed (HostsUpdatedInterrupt, from `commit` or
    `check_host_updates`), the state stays as it is. In both cases, Horovod is initialized again and the function is
    called again. Other exceptions propagate.

    Workers that are lost before they have the state, or while no other worker has it, are started again.
    """
    return run_fn(func, _reset)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Like `run`, with a custom function `reset` that connects to the new workers."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        work = f"{func.__qualname__} (call {next(_calls)})"
        workers_changed, must_sync, has_state = False, True, commits.take(state, work)
        while True:
            try:
                if workers_changed:
                    reset()
                    state.on_reset()
                if _any_worker(must_sync, has_state):
                    state.sync()
                has_state = True
                generations.stay(must_lead=True, end_collectives=_end_collectives)  # before, its state is worth nothing
                commits.forget()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                log.warning("restoring the last commit and continuing with the remaining and new workers: %s", error)
                if engine.current is not None:
                    engine.current.end_device_work(lambda: commits.keep(state, work))
                state.restore()
                must_sync = True
            except HostsUpdatedInterrupt as interrupt:
                log.info("the hosts have changed; continuing with the current workers")
                must_sync = not interrupt.skip_sync
            except RuntimeError:  # also of a device that the abort after a loss has spoiled
                if engine.current is not None and generations.restores_commits() and generations.is_over():
                    engine.current.end_device_work(lambda: commits.keep(state, work))  # which ends this worker
                raise
            workers_changed = True

    return cast(Training, wrapper)


def _end_collectives() -> None:
    if engine.current is not None:
        engine.current.fail("Horovod has been shut down, because the launcher lost a worker.")
    else:  # while it connects
        generations.connections.shut_down()


def _any_worker(must_sync: bool, has_state: bool) -> bool:
    """Return whether any worker must synchronize, since new workers need the state of the others (collective).

    Raises:
        RuntimeError: This worker is new, and so is rank 0, whose state all would take, unlike another worker.
        HorovodInternalError: The same on workers that have the state; one of them leads the next generation.
    """
    if not is_initialized():
        return must_sync
    needs, have = zip(*allgather_object((must_sync, has_state)), strict=True)
    if any(have) and not have[0]:
        error = HorovodInternalError if generations.restores_commits() else RuntimeError
        raise error("rank 0 is a new worker and would replace the state of the others")
    return any(needs)


def _reset() -> None:
    """Connect to the new workers."""
    shutdown()
    if NODE_PROCESS not in os.environ:
        init()  # with the same workers
    while engine.current is None:
        generations.join_next([accelerator.empty_cache])
        try:
            with generations.connections.connecting():
                init()
        except (ValueError, WorldError):
            if not generations.is_over():  # a worker died while this one connected
                raise
