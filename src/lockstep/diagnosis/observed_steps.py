"""What a worker publishes about the steps of any program; `lockstep.world.observer` measures them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, Phase, Phases
from lockstep.files.io_totals import IoTotals

RESULT_MARK = "lockstep-steps "  # prefix of the line in which a worker of a study prints its result
PHASES: tuple[Phase, ...] = ("data_wait", "forward", BEFORE_BACKWARD, "backward", WAITING, "optimizer")
LONGEST = 0.05  # share of the longest steps that a report leaves out, such as those with an evaluation or a checkpoint
UNKNOWN = -1  # a number of processes, cores or exchanges
WAITS = 32  # steps of which the waiting is published
NONE = (0.0,) * len(PHASES)
NO_WAITS = (float(UNKNOWN),) * WAITS


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
class TrainedState:
    """Fingerprints of a worker's weights and of what has changed them, after a step. 0: none, or unknown.

    A worker publishes them now and then, so that the launcher can compare the workers.

    Args:
        step: The number of steps, from 1; 0: nothing was compared yet.
        began: Of the weights before the first step. Weights of which each worker has a part are left out.
        weights: Of the weights after the step. If DistributedDataParallel averages gradients, only its weights.
        gradients: Of their gradients.
        samples: Of the loaders' batches in the step.
        loss: Of the loss.
        settings: Of the optimizers' settings.
        processor: Of the device's name; other processors may round differently.
        exchanges: The number of collectives since the first step; `UNKNOWN` if some may be missed.
        epochs: The number of passes over the data that have ended.
        is_wrapped: Whether DistributedDataParallel has averaged the gradients of these weights over all workers.
        is_joined: Whether the worker has a process group with others.
        repeats_order: Whether a DistributedSampler that shuffles has had the same epoch in several passes.
        rate: The learning rate of the first group of parameters.
        line: "file:line" of the script, where the step was taken.
    """

    step: int = 0
    began: int = 0
    weights: int = 0
    gradients: int = 0
    samples: int = 0
    loss: int = 0
    settings: int = 0
    processor: int = 0
    exchanges: int = UNKNOWN
    epochs: int = 0
    is_wrapped: bool = False
    is_joined: bool = False
    repeats_order: bool = False
    rate: float = 0.0
    line: str = ""


NO_STATE, NO_IO = TrainedState(), IoTotals()


@dataclass(frozen=True)
class LinkUse:
    """What a worker has sent to an address of another host since its last report.

    Args:
        own, peer: Checksums of the two addresses.
        bytes_per_second: What the peer has acknowledged.
        busy: Share of the time in which sent data was not acknowledged.
        resent: Segments that were sent again.
        round_trip: In microseconds.
    """

    own: int
    peer: int
    bytes_per_second: int
    busy: float
    resent: int
    round_trip: int


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
        links: What it has sent to other hosts, in the last report.
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
    links: tuple[LinkUse, ...] = ()

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

    def plus(self, other: ObservedSteps, sign: int = 1) -> ObservedSteps:
        """Return the sums of both; with sign -1, the differences. Without reports, states, links and I/O."""
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
