"""Parallel map over processes: one clear error if a process is killed, and no orphaned processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from lockstep.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(function: Callable[[Task], Result], tasks: Sequence[Task], processes: int) -> Iterator[tuple[Task, Result]]:
    """Yield each task and its result, in order of completion.

    Args:
        function: A module-level function.
        processes: Maximum number of processes; with 1, this process does the work itself.

    Raises:
        DataError: A process was killed.
    """
    processes = min(processes, len(tasks))
    if processes <= 1:
        for task in tasks:
            yield task, function(task)
        return
    context = multiprocessing.get_context("spawn")  # progress bars use a thread, so forking is unsafe
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin)
    task_of: dict[Future[Result], Task] = {}
    try:
        # Ctrl-C signals the whole process group; the worker processes inherit a mask that blocks it.
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for task in tasks:
                task_of[pool.submit(function, task)] = task
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
        for future in as_completed(task_of):
            yield task_of[future], future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise DataError("a process was killed; if memory ran out, lower -j; run the same command again") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        own = set(multiprocessing.active_children()) - others  # empty after normal completion
        for process in own:
            process.terminate()
        for process in own:
            process.join()


def _begin() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
