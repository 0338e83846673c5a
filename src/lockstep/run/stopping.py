"""Stop on request or before a time limit: all workers stop after the same step, with a checkpoint.

Schedulers send SIGTERM, or one of NOTICE, before a time limit or preemption; Ctrl-C sends SIGINT, and a terminal that
is closed SIGHUP. Handlers only store the signal. A time limit is treated like a signal. At the start of a step, the
workers start an all-reduce (8 bytes, on the CPU) of the highest stored signal, and read the result after the step, so
it overlaps with the step. If steps are very short, they also agree to omit it from the next few.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.values import TimeLeft, parse_time_limit
from lockstep.data.sets import Batch
from lockstep.launch.worker_exit import REQUESTS
from lockstep.run.public_calls import STEP, check_call, header
from lockstep.world import generations
from lockstep.world.batch_job import launch_age, time_left
from lockstep.world.world import World

RESERVE_SECONDS = 60.0  # for unmeasured work: the first checkpoint, closing trackers, exiting processes
RESERVE_SHARE = 0.25  # of the time limit, if that is less than RESERVE_SECONDS
TIME_LIMIT = 1  # treated as a signal; lower than all of them, so that a real signal is reported instead
APART_SECONDS = 0.25  # between two agreements of several workers; an unnoticeable delay of a stop
MAX_LEFT_OUT = 31
STOPPING = b"\nlockstep: stopping after this step, with a checkpoint; press Ctrl-C again to exit at once\n"


class Deadline:
    """The time limit of a run, on one worker.

    A worker checks its clock once per round: a training step, or a batch of an evaluation. If it does not request a
    stop now, it can do so only at the next check, and stopping then takes another round and a checkpoint. So it
    requests a stop when the time left is less than the sum of the longest time between two checks, the longest round,
    the longest checkpoint write and a reserve. The clock is monotonic, so setting the system clock has no effect.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + seconds
        self._reserve = min(RESERVE_SECONDS, RESERVE_SHARE * seconds)
        self._checked = math.nan
        self._between, self._round, self._write = _Longest(), _Longest(), _Longest()

    def is_near(self) -> bool:
        """Return whether to request a stop now, at the start of a round."""
        now = self._clock()
        if not math.isnan(self._checked):
            self._between.add(now - self._checked)
        self._checked = now
        margin = self._between.seconds + self._round.seconds + self._write.seconds + self._reserve
        return now + margin >= self._end

    def end_round(self) -> None:
        """End the round that started with the last `is_near`."""
        if not math.isnan(self._checked):
            self._round.add(self._clock() - self._checked)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Surround the write of a checkpoint, to measure it."""
        start = self._clock()
        yield
        self._write.add(self._clock() - start)


class _Longest:
    """The longest of several times, ignoring the first (warm-up) once there is a second."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._count += 1
        self.seconds = seconds if self._count <= 2 else max(self.seconds, seconds)


class Stopping:
    """Stop requests of a single worker.

    `agreed`: the number of the signal that all workers stop for, or TIME_LIMIT, or 0.
    """

    def __init__(self, has_launcher: bool = False):
        """`has_launcher`: whether a launcher handles a second Ctrl-C; without one, that ends this worker at once."""
        self.agreed = 0
        self._noted = 0
        self._earlier: dict[signal.Signals, Any] = {}  # handlers, while listening
        self._has_launcher = has_launcher
        self._deadline = Deadline()

    def end_within(self, left: TimeLeft) -> None:
        """Stop early enough to write a checkpoint in the time left."""
        self._deadline = Deadline(left.seconds)

    def writing(self) -> AbstractContextManager[None]:
        """Surround the write of a checkpoint, to measure how long a stop takes."""
        return self._deadline.writing()

    @property
    def _wanted(self) -> int:
        """What this worker asks the others to stop for."""
        return self._noted or (signal.SIGUSR1 if generations.host_changes(0)[1] else 0)

    @property
    def reason(self) -> str:
        """The reason why all workers stop."""
        return "the time limit" if self.agreed == TIME_LIMIT else signal.Signals(self.agreed).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the block runs; no-op outside the main thread, where Python allows no handlers.

        Ignored signals stay ignored, for example under `nohup`. If a loss ends the block, signals are still noted, for
        the block of the next generation.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.getsignal(number) for number in REQUESTS}
        if _left:
            before = _left.pop()
            earlier, self._noted = before._earlier, before._noted
        self._earlier = earlier = {
            number: handler for number, handler in earlier.items() if handler not in (None, signal.SIG_IGN)
        }
        for number in earlier:
            signal.signal(number, self._note)
        goes_on = False
        try:
            yield
        except Exception as error:
            goes_on = generations.is_interruption(error)
            raise
        except GeneratorExit:  # of a loop of one's own
            goes_on = generations.is_over(0.0)
            raise
        finally:
            if goes_on:
                _left.append(self)
            else:
                for number, handler in earlier.items():
                    signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and not self._has_launcher:
            signal.signal(number, signal.default_int_handler)  # the second one exits at once
            with suppress(OSError):
                os.write(2, STOPPING)  # the signal may have interrupted print()
        self._noted = self._noted or number

    def ask(self) -> None:
        """Start an agreement, which `answer` completes.

        Raises:
            LostPeerError: This generation of the workers is over.
        """
        generations.check()
        if self._deadline.is_near():
            self._noted = self._noted or TIME_LIMIT

    def answer(self) -> bool:
        """Return whether all workers must stop here."""
        self._deadline.end_round()
        self.agreed = self._wanted
        return bool(self.agreed)

    def until_agreed(self, batches: Iterable[Batch], rounds: int) -> Iterator[Batch]:
        """Yield this worker's batches until all workers agree to stop; no worker has more than `rounds` batches."""
        iterator = iter(batches)
        for _ in range(rounds):
            self.ask()
            if (batch := next(iterator, None)) is not None:
                yield batch
            if self.answer():
                return


_left: list[Stopping] = []  # that of a run which a loss has interrupted, until it goes on
_forking = threading.local()


def _hold_back() -> None:
    """Block SIGTERM before a fork: Python forgets a signal that reaches a child before its first instruction."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _end_as_before() -> None:
    """Let SIGTERM end a forked child, such as one of multiprocessing.Pool, which waits for that end."""
    if isinstance(stopping := getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Stopping):
        signal.signal(signal.SIGTERM, stopping._earlier[signal.SIGTERM])
    _let_through()


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_end_as_before)


class StoppingTogether(Stopping):
    """Stop requests of several workers."""

    def __init__(self, world: World, has_launcher: bool = True):
        super().__init__(has_launcher)
        self._world = world
        # The header of a call, with this worker's signal and minus the number of rounds it proposes to omit; the
        # maximum of each counts. On the CPU, to avoid waiting for a device.
        self._ballot = torch.zeros(4, dtype=torch.int64, device="cpu")
        self._work: Any = None
        self._asked_at = 0.0
        self._left_out = 0  # rounds to omit

    def ask(self) -> None:
        super().ask()
        now = time.monotonic()
        round_seconds, self._asked_at = now - self._asked_at, now
        if self._left_out:
            self._left_out -= 1
            return
        self._wait()  # before reusing the ballot
        left_out = min(int(APART_SECONDS / max(round_seconds, 1e-6)), MAX_LEFT_OUT)
        self._ballot.copy_(torch.tensor(header(STEP, self._wanted, -left_out), device="cpu"))
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, self._world.host_group, async_op=True)

    def answer(self) -> bool:
        has_asked = self._work is not None
        self._wait()
        self._deadline.end_round()
        if has_asked:
            self.agreed, negative = check_call(self._world, STEP, self._ballot.tolist())
            self._left_out = -negative
        return has_asked and bool(self.agreed)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def build_stopping(world: World) -> Stopping:
    """Return the stop handling for one worker, or for several that must agree."""
    has_launcher = world.rank_info.launcher != "none"
    return StoppingTogether(world, has_launcher) if world.size > 1 else Stopping(has_launcher)


def hosts_changed(stopping: Stopping, world: World) -> bool:
    """Whether the workers agreed to stop because the job's hosts have changed, and stay. Collective, like that."""
    if stopping.agreed != signal.SIGUSR1:
        return False
    news, stays = zip(*world.gather([generations.host_changes(0)[1], generations.stays()]), strict=True)
    return any(news) and all(stays)


def agreed_time_left(limit: str | None, world: World) -> TimeLeft | None:
    """Return the time left, as known by rank 0, for all workers. Collective.

    Args:
        limit: Counts from the start of the job, such as "2h", or "none"; None: that of the batch job, if known.
    """
    left = None
    if world.is_main and limit is None:
        left = time_left(os.environ)
    elif world.is_main and (seconds := parse_time_limit(limit or "none")):
        left = TimeLeft(seconds - launch_age(), "--time-limit")
    shared = world.from_main([left.seconds, left.source] if left else None)
    return TimeLeft(*shared) if shared else None
