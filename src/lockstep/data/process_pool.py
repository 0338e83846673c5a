"""The same work on many things, by all cores: one clear error when a process is lost, and none left behind."""

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
    """Yield each `function(task, advance)` as it is done.

    Args:
        function: A module's own; it calls its `advance` with the number of things it has got done since.
        processes: At most so many; with 1, this process does the work itself.
        advance: Is called in this process with what the others have got done.

    Raises:
        DataError: A process was killed.
    """
    processes = min(processes, len(tasks))
    if processes <= 1:
        for task in tasks:
            yield function(task, advance)
        return
    context = multiprocessing.get_context("spawn")  # progress bars have a thread, with which forking is not safe
    done_things, seen = context.Value("q", 0), 0
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _begin, (done_things,))
    pending: set[Future[Result]] = set()
    try:
        # Ctrl-C goes to all of a terminal's processes: it stays blocked in those that start here.
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for task in tasks:
                pending.add(pool.submit(_work, function, task))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            # Past the lock, with which a process may have died; an aligned number is read at once.
            before, seen = seen, done_things.get_obj().value
            advance(seen - before)
            for future in done:
                yield future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise DataError("a process was killed; if memory ran out, lower -j; run the same command again") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        own = set(multiprocessing.active_children()) - others  # none after a good end
        for process in own:
            process.terminate()
        for process in own:
            process.join()


_done_things: Any = None


def _begin(done_things: Any) -> None:
    global _done_things
    _done_things = done_things
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _work(function: Callable[[Task, Advance], Result], task: Task) -> Result:
    return function(task, _advance)


def _advance(count: int) -> None:
    with _done_things.get_lock():
        _done_things.value += count
