"""Stopping on request: a signal to any worker, and all of them stop after the same step, with a checkpoint.

SIGTERM and SIGUSR1 are what schedulers send ahead of a time limit or a preemption; SIGINT is Ctrl-C. A handler only
takes a note. A time limit that comes near (`lockstep.train.stopping.deadline`) is noted as if it were a signal. At the
start of a step the workers begin to agree on the highest signal that any of them has noted, and read the outcome when
the step is done: one all-reduce of eight bytes on CPU, hidden behind the step. Where steps are so short that it would
be felt, they agree, too, to leave it out of the next few.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.time_limit import TimeLeft
from lockstep.data.batch import Batch
from lockstep.launch.worker_exit import REQUESTS
from lockstep.train.stopping.deadline import Deadline
from lockstep.world.world import World

TIME_LIMIT = 1  # noted as if it were a signal; below all of those, so that a signal is told instead if both come
APART_SECONDS = 0.05  # in so much time, several workers agree once; nobody feels that a stop comes so much later
MOST_LEFT_OUT = 31
STOPPING = b"\nlockstep: stopping after this step, with a checkpoint; press Ctrl-C again to exit at once\n"


class Stopping:
    """Whether a run is to stop, for one worker alone.

    `agreed` is the number of the signal that all workers stop for, or TIME_LIMIT, or 0.
    """

    def __init__(self, has_launcher: bool = False):
        """`has_launcher`: Ctrl-C twice is the launcher's business; without one, the second ends this worker at once."""
        self.agreed = 0
        self._noted = 0
        self._has_launcher = has_launcher
        self._deadline = Deadline()

    def end_within(self, left: TimeLeft) -> None:
        """Stop in time for a checkpoint before what is left now is over."""
        self._deadline = Deadline(left.seconds)

    def writing(self) -> AbstractContextManager[None]:
        """A checkpoint is written while the block runs, which is what a stop has to leave time for."""
        return self._deadline.writing()

    @property
    def reason(self) -> str:
        """What all workers stop for, in words."""
        return "the time limit" if self.agreed == TIME_LIMIT else signal.Signals(self.agreed).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals while the block runs; in another than the main thread, Python allows no handlers.

        What is ignored, as by `nohup`, stays ignored.
        """
        earlier = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in REQUESTS}
            earlier = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
        for number in earlier:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and not self._has_launcher:
            signal.signal(number, signal.default_int_handler)  # the second one ends at once
            os.write(2, STOPPING)  # print() might be what the signal has interrupted
        self._noted = self._noted or number

    def ask(self) -> None:
        """Begin to agree; `answer` ends it. What no `answer` has followed, training having gone back, is forgotten."""
        if self._deadline.is_near():
            self._noted = self._noted or TIME_LIMIT

    def answer(self) -> bool:
        """Whether all workers are to stop here."""
        self._deadline.end_round()
        self.agreed = self._noted
        return bool(self.agreed)

    def until_agreed(self, batches: Iterable[Batch], rounds: int) -> Iterator[Batch]:
        """This worker's batches, up to the round in which all agree to stop; no worker has more than `rounds`."""
        iterator = iter(batches)
        for _ in range(rounds):
            self.ask()
            if (batch := next(iterator, None)) is not None:
                yield batch
            if self.answer():
                return


class StoppingTogether(Stopping):
    """The same for several workers."""

    def __init__(self, has_launcher: bool = True, host_group: Any = None):
        super().__init__(has_launcher)
        self._group = host_group
        # What this worker noted, and the negative of how many rounds it would leave out. The highest of both count. On
        # the CPU, where no device is waited for.
        self._ballot = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None
        self._asked_at = 0.0
        self._left_out = 0  # rounds from now on in which nobody asks

    def ask(self) -> None:
        super().ask()
        now = time.monotonic()
        round_seconds, self._asked_at = now - self._asked_at, now
        if self._left_out:
            self._left_out -= 1
            return
        self._wait()  # before the ballot is another
        left_out = min(int(APART_SECONDS / max(round_seconds, 1e-6)), MOST_LEFT_OUT)
        self._ballot.copy_(torch.tensor([self._noted, -left_out]))
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, self._group, async_op=True)

    def answer(self) -> bool:
        has_asked = self._work is not None
        self._wait()
        self._deadline.end_round()
        if has_asked:
            self.agreed, negative = self._ballot.tolist()
            self._left_out = -negative
        return has_asked and bool(self.agreed)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def build_stopping(world: World) -> Stopping:
    """What a worker of this world stops by."""
    has_launcher = world.place.launcher != "none"
    return StoppingTogether(has_launcher, world.host_group) if world.size > 1 else Stopping(has_launcher)
