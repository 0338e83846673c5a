"""What a worker publishes about the steps of any program; `lockstep.world.observer` measures them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, Phase, Phases
from lockstep.diagnosis.trained_state import STATE_LAYOUT, TrainedState
from lockstep.files.io_totals import TOTALS_LAYOUT, IoTotals

RESULT_MARK = "lockstep-steps "  # prefix of the line in which a worker of a study prints its result
PHASES: tuple[Phase, ...] = ("data_wait", "forward", BEFORE_BACKWARD, "backward", WAITING, "optimizer")
LONGEST = 0.05  # share of the longest steps that a report leaves out, such as those with an evaluation or a checkpoint
UNKNOWN = -1  # samples, in memory
WAITS = 32  # steps of which the waiting is published
LAYOUT = struct.Struct(f"=qqqqQdQQ{2 * len(PHASES) + WAITS}d")
FACTS_BYTES = 256
AT_STATE = LAYOUT.size + FACTS_BYTES
AT_IO = AT_STATE + STATE_LAYOUT.size
SIZE_BYTES = AT_IO + TOTALS_LAYOUT.size
NONE = (0.0,) * len(PHASES)
NO_WAITS = (float(UNKNOWN),) * WAITS
NO_STATE = TrainedState()
NO_IO = IoTotals()


@dataclass(frozen=True)
class ProgramFacts:
    """What explains the speed of a worker's program; docs/reference/run-folder.md describes the fields."""

    gradient_bytes: int = 0
    element_bytes: int = 0
    tensors: int = 0
    exchange: str = ""
    threads: int = 0
    cores: int = 0
    local_workers: int = 0
    loader_processes: int = UNKNOWN
    free_cores: float = float(UNKNOWN)
    device: str = ""
    host_wait: float = 0.0


NO_FACTS = ProgramFacts()


@dataclass(frozen=True)
class ObservedSteps:
    """The steps of a process so far, and its last report for comparing workers.

    Args:
        steps: The number of steps.
        samples: The number of training samples; None if it is unknown.
        interval_steps: The number of steps in `interval_seconds`: without the first one, and what came after the last.
        interval_samples: The number of samples in these steps.
        timed_steps: The number of steps in `phase_seconds`.
        report: The number of the last report; 0: none yet.
        report_steps: The number of steps in it.
        phase_seconds: The sum of the seconds in each of `PHASES`, on the device that trains.
        report_seconds: The mean seconds per step in each of `PHASES`, without the longest steps.
        waits: The seconds of waiting for other workers in some timed steps, in places that depend on their numbers.
        facts: About the program.
        state: The newest fingerprints of what is trained.
        io: The I/O of the process and its children, if it is recorded.
    """

    steps: int = 0
    samples: int | None = None
    interval_steps: int = 0
    interval_samples: int = 0
    timed_steps: int = 0
    interval_seconds: float = 0.0
    report: int = 0
    report_steps: int = 0
    phase_seconds: tuple[float, ...] = NONE
    report_seconds: tuple[float, ...] = NONE
    waits: tuple[float, ...] = NO_WAITS
    facts: ProgramFacts = NO_FACTS
    state: TrainedState = NO_STATE
    io: IoTotals = NO_IO

    @property
    def steps_per_second(self) -> float:
        return self.interval_steps / self.interval_seconds if self.interval_seconds else 0.0

    @property
    def samples_per_second(self) -> float | None:
        """None if the samples are unknown."""
        known = self.samples is not None and self.interval_seconds > 0
        return self.interval_samples / self.interval_seconds if known else None

    @property
    def per_step(self) -> dict[Phase, float]:
        """The mean seconds per step in each phase that took any time."""
        pairs = zip(PHASES, self.phase_seconds, strict=True)
        return {phase: seconds / self.timed_steps for phase, seconds in pairs if seconds and self.timed_steps}

    def pack(self) -> bytes:
        """Return it as `SIZE_BYTES` bytes."""
        steps, samples, *numbers, phases, report, waits, facts, _, _ = astuple(self)
        packed = LAYOUT.pack(steps, UNKNOWN if samples is None else samples, *numbers, *phases, *report, *waits)
        return packed + json.dumps(facts).encode().ljust(FACTS_BYTES) + self.state.pack() + self.io.pack()

    @classmethod
    def unpack(cls, data: bytes) -> ObservedSteps:
        """Return what `pack` has packed."""
        steps, samples, *numbers = LAYOUT.unpack(data[: LAYOUT.size])
        numbers, waits = numbers[:-WAITS], tuple(numbers[-WAITS:])
        counts, seconds = numbers[: -2 * len(PHASES)], tuple(numbers[-2 * len(PHASES) :])
        known = None if samples == UNKNOWN else samples
        facts = ProgramFacts(*json.loads(data[LAYOUT.size : AT_STATE]))
        state, io = TrainedState.unpack(data[AT_STATE:AT_IO]), IoTotals.unpack(data[AT_IO:])
        return cls(*(steps, known, *counts, seconds[: len(PHASES)], seconds[len(PHASES) :], waits, facts, state, io))

    def plus(self, other: ObservedSteps, sign: int = 1) -> ObservedSteps:
        """Return the sums of both; with sign -1, the differences. Without reports, states and I/O."""
        samples = None
        if self.samples is not None or (other.samples is not None and sign > 0):
            samples = (self.samples or 0) + sign * (other.samples or 0)
        return ObservedSteps(
            self.steps + sign * other.steps,
            samples,
            self.interval_steps + sign * other.interval_steps,
            self.interval_samples + sign * other.interval_samples,
            self.timed_steps + sign * other.timed_steps,
            self.interval_seconds + sign * other.interval_seconds,
            phase_seconds=tuple(
                own + sign * others for own, others in zip(self.phase_seconds, other.phase_seconds, strict=True)
            ),
        )


@dataclass(frozen=True)
class ProcessSteps:
    """The steps that a process of a worker has taken.

    Args:
        met: It has created a process group with others.
    """

    rank: int
    pid: int
    met: bool
    steps: ObservedSteps


def total_seconds(steps: Iterable[Phases]) -> dict[Phase, float]:
    """Return the time in each phase, summed over steps."""
    seconds: dict[Phase, float] = {}
    for step in steps:
        for phase, duration in step.items():
            seconds[phase] = seconds.get(phase, 0.0) + duration
    return seconds


def usual_seconds(steps: Sequence[Mapping[Phase, float]]) -> tuple[float, ...]:
    """Return the mean seconds in each of `PHASES`, without the longest steps."""
    counted = len(steps) - math.ceil(LONGEST * len(steps))
    by_phase = ([step.get(phase, 0.0) for step in steps] for phase in PHASES)
    return tuple(sum(sorted(seconds)[:counted]) / counted for seconds in by_phase)


def sample_waits(waits: Sequence[float], steps: Sequence[Phases], first: int) -> tuple[float, ...]:
    """Return `ObservedSteps.waits` with those of new steps, the first of which has the number `first`."""
    found = list(waits)
    for number, step in enumerate(steps, start=first):
        interval = 1 << max(0, number.bit_length() - WAITS.bit_length())
        if number % interval == 0:
            found[number // interval % WAITS] = step.get(WAITING, 0.0)
    return tuple(found)


def transfer_seconds(waits: Iterable[Sequence[float]]) -> float | None:
    """Return how long the last worker waits in a usual step: the exchange itself, without waiting for a worker.

    Args:
        waits: The waiting of each worker in the same steps; negative: unknown.
    """
    least = sorted(each for each in map(min, zip(*waits, strict=False)) if each >= 0)
    counted = least[: len(least) - math.ceil(LONGEST * len(least)) or 1]
    return fmean(counted) if counted else None
