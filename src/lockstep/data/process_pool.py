"""Parallel map over processes: one clear error if a process is killed, and no orphaned processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from lockstep.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")
Advance = Callable[[int], None]
POLL_SECONDS = 0.2


def run_all(
    function: Callable[[Task, Advance], Result], tasks: Sequence[Task], processes: int, advance: Advance
) -> Iterator[Result]:
    """Yield the results of `function(task, advance)` in order of completion.

    Args:
        function: A module-level function; it calls its `advance` with the number of items done since the last call.
        processes: Maximum number of processes; with 1, this process does the work itself.
        advance: Called in this process with the number of items done by all processes since the last call.

    Raises:
        DataError: A process was killed.
    """
    processes = min(processes, len(tasks))
    if processes <= 1:
        for task in tasks:
            yield function(task, advance)
        return
    context = multiprocessing.get_context("spawn")  # progress bars use a thread, so forking is unsafe
    done_items, seen = context.Value("q", 0), 0
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin, (done_items,))
    pending: set[Future[Result]] = set()
    try:
        # Ctrl-C signals the whole process group; the worker processes inherit a mask that blocks it.
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for task in tasks:
                pending.add(pool.submit(_work, function, task))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            # Read without the lock, which a killed process may hold; aligned 8-byte reads are atomic.
            before, seen = seen, done_items.get_obj().value
            advance(seen - before)
            for future in done:
                yield future.result()
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


_done_items: Any = None


def _begin(done_items: Any) -> None:
    global _done_items
    _done_items = done_items
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _work(function: Callable[[Task, Advance], Result], task: Task) -> Result:
    return function(task, _advance)


def _advance(count: int) -> None:
    with _done_items.get_lock():
        _done_items.value += count
