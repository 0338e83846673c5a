"""Explain a hang from within the workers, in jobs that another launcher started: srun, mpirun, torchrun, Kubernetes.

Each worker watches itself in a thread. One that makes no progress asks all ranks for their states through the job's
store; the lowest rank that can does so. Ranks that do not answer are stopped, frozen or unreachable.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.mapping import from_mapping
from lockstep.diagnosis import FOLDER, publisher
from lockstep.diagnosis.board import BoardReader
from lockstep.diagnosis.explanation import Explanation, explain
from lockstep.diagnosis.idle_clock import HANG_TIMEOUT, IdleClock, hang_limit
from lockstep.diagnosis.inspection import WorkerState, own_state
from lockstep.errors import HangError, LockstepError
from lockstep.files.output import say
from lockstep.files.untrusted import parse_json

if TYPE_CHECKING:
    from torch.distributed import Store

POLLS = 20  # of the store, within the time limit
MARGIN_SECONDS = 2.0
LAST_SECONDS = 3.0  # for the last look of a thread
MAX_TURNS = 5  # ranks that try to collect the states, one after the other


def watched_by_launcher() -> bool:
    """Whether Lockstep's launcher started this worker, and watches it from outside."""
    return bool(os.environ.get(FOLDER))


Check = Callable[[Any], None]  # given a store


class StoreWatch:
    """Runs a check of the job's store at intervals, in a separate thread, until `close` or until the store is closed.

    Args:
        check: Called with a connection of its own: another thread may block on the store.
        finish: The same, once `close` is called.
    """

    def __init__(self, store: Any, check: Check, interval_seconds: float, finish: Check = lambda store: None) -> None:
        self._store = store
        self._check = check
        self._interval_seconds = interval_seconds
        self._finish = finish
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-store-watch", daemon=True)
        # Debuggers suspend all threads but these; then this one could not report that there is a debugger.
        vars(self._thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        # If the interpreter shut down while the thread is in torch's store, the process would abort.
        if self._thread is not threading.current_thread():
            self._thread.join(LAST_SECONDS)

    def _watch(self) -> None:
        try:
            own_connection = self._store.clone()
            while not self._ended.wait(self._interval_seconds):
                self._check(own_connection)
            self._finish(own_connection)
        except RuntimeError:  # the store is closed
            return


class GroupWatch:
    """Watches this worker, and takes part in explaining a hang.

    Args:
        store: The job's store. All ranks create a watch, unless their launcher watches them or nothing is a hang.
        end: Called with the error if the hang ends the job; in the thread, on every rank that runs.
    """

    def __init__(self, store: Store, rank: int, size: int, end: Callable[[LockstepError], None]) -> None:
        self._rank = rank
        self._size = size
        self._end = end
        self._limit = hang_limit()
        self._poll_seconds = self._limit / POLLS
        self._answer_seconds = 2 * self._poll_seconds + MARGIN_SECONDS
        # Each rank waits for its turn, so that the first one that runs collects the states.
        self._turn = self._limit + min(rank, MAX_TURNS) * 2 * self._answer_seconds
        self._clock = IdleClock(self._limit)
        self._polled = self._not_before = 0.0
        self._ended = threading.Event()
        self._answered = 0
        self._is_explained = False
        self._board = self._own_board()
        self._watch = StoreWatch(store, self._check, self._clock.tick_seconds) if self._board else None

    def disarm(self) -> None:
        """Explain nothing from now on: this worker exits."""
        self._ended.set()
        if self._watch:
            self._watch.close()

    def close(self) -> None:
        """Stop the thread."""
        self.disarm()
        if self._board:
            publisher.stop()

    def _own_board(self) -> BoardReader | None:
        """Start to publish this worker's progress; the files are removed at once, since only this process maps them."""
        folder = Path(tempfile.mkdtemp(prefix="lockstep-progress-"))
        try:
            board = publisher.start_in(folder, self._rank)
            return board.reader() if board else None
        except (OSError, ValueError):
            return None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _check(self, store: Store) -> None:
        assert self._board
        own = self._board.read()
        idle_s = self._clock.tick([own] if own.is_judged else [])
        self._is_explained &= idle_s > 0
        if time.monotonic() - self._polled >= self._poll_seconds:
            self._polled = time.monotonic()
            self._answer(store, idle_s)
        if idle_s >= self._turn and not self._is_explained and time.monotonic() >= self._not_before:
            self._is_explained = self._collect(store, idle_s)
            self._not_before = time.monotonic() + self._limit / 4

    def _answer(self, store: Store, idle_s: float) -> None:
        """Answer the newest question, and end if that question ended the job."""
        assert self._board
        question = store.add("hang/asked", 0)
        if question > self._answered:
            self._answered = question
            self._is_explained = True  # by the rank that asked, unless there is progress
            state = own_state(self._board, publisher.own_answer())
            own = {"idle_s": idle_s, "host": socket.gethostname(), "state": asdict(state)}
            store.set(f"hang/{question}/{self._rank}", json.dumps(own))
        if question and store.check([f"hang/{question}/end"]):
            self._end(HangError(store.get(f"hang/{question}/end").decode()))

    def _collect(self, store: Store, idle_s: float) -> bool:
        """Ask all ranks, and explain the hang; return False if a rank is making progress or shows signs of life.

        A rank that does not answer soon has as long as the limit: a thread of it may hold the GIL.
        """
        question = store.add("hang/asked", 1)
        self._answered = question - 1
        self._answer(store, idle_s)
        answers = self._answers_to(store, question)
        if any(answer["idle_s"] < self._limit / 2 for answer in answers.values()) or self._ended.is_set():
            return False
        states = [
            from_mapping(WorkerState, answers[rank]["state"], "state") if rank in answers else WorkerState(rank)
            for rank in range(self._size)
        ]
        if any(state.is_debugged for state in states):
            return True
        hosts = {rank: str(answer["host"]) for rank, answer in answers.items()}
        self._report(store, question, explain(states, idle_s, lambda rank: hosts.get(rank, "")))
        return True

    def _answers_to(self, store: Store, question: int) -> dict[int, dict[str, Any]]:
        """Return the answers by rank, and remove them from the store; stop waiting once a rank is not idle."""
        keys = [f"hang/{question}/{rank}" for rank in range(self._size)]
        answers: dict[int, dict[str, Any]] = {}
        for patience in (self._answer_seconds, self._limit):
            deadline = time.monotonic() + patience
            while not store.check(keys) and time.monotonic() < deadline and not self._ended.wait(0.1):
                pass
            answers = {rank: parse_json(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
            if any(answer["idle_s"] < self._limit / 2 for answer in answers.values()) or self._ended.is_set():
                break
        for key in keys:
            store.delete_key(key)
        return answers

    def _report(self, store: Store, question: int, found: Explanation) -> None:
        ends = HANG_TIMEOUT in os.environ or found.ends_training
        notes = [] if ends else [f"the job continues to wait; {HANG_TIMEOUT}=SECONDS would end it"]
        say("\n".join(found.printed(*notes)))
        if ends:
            store.set(f"hang/{question}/end", f"the job hung: {found.lines[0].removesuffix(':')}")
            self._ended.wait(self._poll_seconds + MARGIN_SECONDS)  # until the other ranks have read it
            self._answer(store, 0.0)
