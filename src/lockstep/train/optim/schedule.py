"""The learning rate as a pure function of the step; there is nothing to save or restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch.optim import Optimizer

from lockstep.config.schema import OptimConfig
from lockstep.train.optim.build import set_rate

ONECYCLE_WARMUP = 0.25  # share of the run in which onecycle climbs, unless --warmup-epochs says otherwise


class Rates(Protocol):
    """What gives the optimizer its learning rates."""

    @property
    def peak(self) -> float:
        """The largest rate, as far as it is known when the run begins."""

    def apply(self, optimizer: Optimizer, steps_taken: int, steps: int) -> None:
        """Set the rates of the step that comes after `steps`, of which the optimizer has taken `steps_taken`."""

    def describe(self, config: OptimConfig, global_batch: int) -> str:
        """The rate and its course, for people."""


@dataclass(frozen=True)
class Schedule:
    """A rate that climbs linearly to `peak` over `warmup_steps` and then follows `kind` until `total_steps`.

    cosine: half a cosine down to `final` times the peak (I. Loshchilov, F. Hutter, arXiv 1608.03983). onecycle: a
    straight line down to it (after L. Smith, N. Topin, arXiv 1708.07120). step: times `gamma` at each of `milestones`
    (in steps). constant: stays.
    """

    kind: Literal["cosine", "onecycle", "step", "constant"]
    peak: float
    total_steps: int
    warmup_steps: int = 0
    final: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def apply(self, optimizer: Optimizer, steps_taken: int, steps: int) -> None:
        """Set the rate of the coming step; it goes by those that changed the weights."""
        set_rate(optimizer, self.rate(steps_taken))

    def describe(self, config: OptimConfig, global_batch: int) -> str:
        """The peak rate and how it came about, and the course."""
        peak, how = peak_rate(config, global_batch)
        s = "" if self.warmup_steps == 1 else "s"
        return f"{peak:g} = {how}; {self.kind}, {self.warmup_steps} step{s} of warm-up"

    def rate(self, step: int) -> float:
        """The learning rate of the step that comes after `step` steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "step":
            return self.peak * self.gamma ** sum(step >= milestone for milestone in self.milestones)
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.peak * (self.final + (1 - self.final) * left)


def peak_rate(config: OptimConfig, global_batch: int) -> tuple[float, str]:
    """The peak rate for a global batch, and how it came about.

    linear: in proportion to the batch (P. Goyal et al., arXiv 1706.02677); sqrt: to its square root (A. Krizhevsky,
    arXiv 1404.5997).
    """
    if config.lr_scaling == "none":
        return config.lr, "as given (--lr-scaling none)"
    ratio = global_batch / config.lr_base_batch
    root, sign = (math.sqrt(ratio), "√") if config.lr_scaling == "sqrt" else (ratio, "")
    how = f"{config.lr:g} × {sign}({global_batch} / {config.lr_base_batch}), {config.lr_scaling} scaling"
    return config.lr * root, how


def build_schedule(config: OptimConfig, peak: float, epochs: int, steps_per_epoch: int) -> Schedule:
    """The schedule of a whole run; epochs of the configuration become steps here."""
    total = epochs * steps_per_epoch
    warmup = config.warmup_epochs * steps_per_epoch
    if config.schedule == "onecycle" and not warmup:
        warmup = ONECYCLE_WARMUP * total
    return Schedule(
        kind=config.schedule,
        peak=peak,
        total_steps=total,
        warmup_steps=min(total, round(warmup)),
        final=config.lr_final,
        milestones=tuple(round(epoch * steps_per_epoch) for epoch in config.lr_milestones),
        gamma=config.lr_gamma,
    )
