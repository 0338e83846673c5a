"""A step as it was measured: each worker's seconds by phase, facts about the program, and what would shorten it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from lockstep.diagnosis.observed_steps import NO_FACTS, ProgramFacts
from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING, names
from lockstep.diagnosis.stragglers import medians_of_others, slows_others
from lockstep.observe.link_comparison import SlowLink

COMPUTE = ("forward", "backward", "metrics", "optimizer")
FORWARD_PASSES = 2.0  # that a backward pass on a CPU takes
TENSOR_SECONDS = 6e-5  # of forward and backward for each parameter tensor, however small the batch


@dataclass(frozen=True)
class MeasuredStep:
    """The usual step of a program.

    Args:
        phases: For each phase, the seconds per step of each rank.
        transfer_seconds: The waiting of the last worker in a step; None: the smallest mean waiting of a worker.
        difference: By which share two halves of the run, or the repeats, differ; infinity: unknown.
        gpu_use: Share of the time in which the GPUs computed anything; None: unknown.
        slow_links: Links that are slower than the others.
    """

    phases: Mapping[str, Sequence[float]]
    transfer_seconds: float | None
    difference: float
    records: int
    steps: int
    hosts: int = 1
    facts: ProgramFacts = NO_FACTS
    gpu_use: float | None = None
    slow_links: Sequence[SlowLink] = ()

    @property
    def workers(self) -> int:
        return len(next(iter(self.phases.values()), ()))

    def by_rank(self, *phases: str) -> list[float]:
        """Return the seconds of each rank in some phases."""
        columns = [self.phases.get(phase) or [0.0] * self.workers for phase in phases]
        return [sum(each) for each in zip(*columns, strict=True)]

    def of(self, *phases: str) -> float:
        """Return the median over the ranks."""
        return median(self.by_rank(*phases))

    def without(self, rank: int) -> MeasuredStep:
        """Return the step of the other ranks."""
        return replace(self, phases={phase: [*each[:rank], *each[rank + 1 :]] for phase, each in self.phases.items()})

    @property
    def seconds(self) -> float:
        return fmean(self.by_rank(*self.phases))

    @property
    def own(self) -> list[float]:
        """The seconds of each rank without waiting for others."""
        return self.by_rank(*(phase for phase in self.phases if phase != WAITING))

    @property
    def data_wait(self) -> float:
        """The seconds of waiting for data: of the rank that waits longest, if loader processes load ahead.

        The others wait for that rank, while their own processes load.
        """
        waits = self.by_rank("data_wait")
        return max(waits) if self.facts.loader_processes > 0 else median(waits)

    @property
    def transfer(self) -> float:
        """The seconds of the exchange, without waiting for a worker."""
        if self.workers < 2:
            return 0.0
        least = min(self.by_rank(WAITING))
        return least if self.transfer_seconds is None else min(least, self.transfer_seconds)

    @property
    def slowed_backward(self) -> float:
        """The estimated time that the backward pass takes longer on a CPU, because it shares that with the exchange."""
        if not self.is_on_cpu or self.hosts < 2 or not self.of("forward"):
            return 0.0
        return max(0.0, min(self.transfer, self.of("backward") - FORWARD_PASSES * self.of("forward")))

    @property
    def wire_bytes(self) -> float:
        """The bytes that a worker sends in an all-reduce of its gradients; 0: unknown."""
        return 2 * (self.workers - 1) / self.workers * self.facts.gradient_bytes

    @property
    def is_on_cpu(self) -> bool:
        return self.facts.device in ("cpu", "")

    @property
    def idle_share(self) -> float:
        """The share of the time in which GPUs compute nothing, and no wait for data, workers or GPU explains it."""
        if self.gpu_use is None or self.is_on_cpu or not self.seconds:
            return 0.0
        return 1 - self.gpu_use - (self.data_wait + self.of(WAITING) + self.facts.host_wait) / self.seconds

    @property
    def fixed_seconds(self) -> float:
        """The estimated time of the two passes that does not depend on the batch."""
        return min(0.9 * self.of("forward", "backward"), TENSOR_SECONDS * self.facts.tensors)


class SlowRank(NamedTuple):
    """A rank that the others wait for, the phase in which it loses most time, and the seconds that it takes more."""

    rank: int
    phase: str
    seconds: float

    @property
    def where(self) -> str:
        return names(self.phase).message.partition(",")[0].partition(" (")[0]


def find_slow_rank(step: MeasuredStep) -> SlowRank | None:
    """Return the rank that slows the others down, by the rules of `StragglerWatch`."""
    own = step.own
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=own.__getitem__)
    usual = medians_of_others(own)[rank]
    seconds, waits = own[rank] - usual, medians_of_others(step.by_rank(WAITING))[rank] - step.transfer
    if not slows_others(own[rank], usual, step.seconds, waits):
        return None
    phases = {phase: each for phase, each in step.phases.items() if phase != WAITING}
    over = {phase: each[rank] - medians_of_others(each)[rank] for phase, each in phases.items()}
    phase = max(over, key=lambda phase: over[phase])
    # Loader processes that load ahead are no slower on the rank that waits for them: the others' load during that wait.
    return None if phase == "data_wait" and step.facts.loader_processes > 0 else SlowRank(rank, phase, seconds)


def parts_of_step(step: MeasuredStep, slow: SlowRank | None) -> dict[str, float]:
    """Return the seconds of a step by what would shorten it."""
    unseen = step.facts.loader_processes < 0 and not step.of("forward", "data_wait")
    usual, own = step.without(slow.rank) if slow else step, step.own
    waiting = fmean(step.by_rank(WAITING)) - step.transfer
    return {
        "data": usual.data_wait,
        "computing": usual.of(*COMPUTE),
        "forward or other work" if unseen else "other work": usual.of(BEFORE_BACKWARD, "callbacks"),
        "exchange": step.transfer,
        "slow worker": slow.seconds if slow else 0.0,
        "uneven steps": max(0.0, waiting - (max(own) - fmean(own))),
    }
