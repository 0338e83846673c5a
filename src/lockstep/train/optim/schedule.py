"""The global batch size, and the learning rate as a pure function of the step, without state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer

from lockstep.config.schema import OptimConfig, TrainConfig
from lockstep.data.sets import ImageData
from lockstep.data.sharding import Sharding
from lockstep.data.transforms import mixes
from lockstep.errors import plural
from lockstep.train.optim.build import set_rate

ONECYCLE_WARMUP = 0.25  # warm-up of onecycle as a fraction of the run, unless --warmup-epochs is given


@dataclass(frozen=True)
class Schedule:
    """A rate that rises linearly to `peak` over `warmup_steps` and then follows `kind` until `total_steps`.

    cosine: half a cosine down to `final` times the peak (I. Loshchilov, F. Hutter, arXiv 1608.03983). onecycle: linear
    decay to `final` times the peak (after L. Smith, N. Topin, arXiv 1708.07120). step: multiplied by `gamma` at each of
    `milestones` (in steps). constant: no change.
    """

    kind: Literal["cosine", "onecycle", "step", "constant"]
    peak: float
    total_steps: int
    warmup_steps: int = 0
    final: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def apply(self, optimizer: Optimizer, steps_taken: int, steps: int) -> None:
        """Set the rate of the next step, based on the steps that changed the weights."""
        set_rate(optimizer, self.rate(steps_taken))

    def describe(self, config: OptimConfig, global_batch: int) -> str:
        """Describe the peak rate, how it is computed, and the schedule."""
        peak, how = peak_rate(config, global_batch)
        return f"{peak:g} = {how}; {self.kind}, {plural(self.warmup_steps, 'step')} of warm-up"

    def rate(self, step: int) -> float:
        """Return the learning rate of the next step after `step` steps."""
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
    """Return the peak rate for a global batch, and a description of how it is computed.

    linear: proportional to the batch (P. Goyal et al., arXiv 1706.02677); sqrt: proportional to its square root
    (A. Krizhevsky, arXiv 1404.5997).
    """
    if config.lr_scaling == "none":
        return config.lr, "as given (--lr-scaling none)"
    ratio = global_batch / config.lr_base_batch
    root, sign = (math.sqrt(ratio), "√") if config.lr_scaling == "sqrt" else (ratio, "")
    how = f"{config.lr:g} × {sign}({global_batch} / {config.lr_base_batch}), {config.lr_scaling} scaling"
    return config.lr * root, how


def build_schedule(config: OptimConfig, peak: float, epochs: int, steps_per_epoch: int) -> Schedule:
    """Build the schedule of a run, converting epochs to steps."""
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


DEFAULT_BATCH = 64


@dataclass(frozen=True)
class Batching:
    """Samples per optimizer step, passes per step, and the reason."""

    global_batch: int
    accumulate: int
    reason: str


def plan_batches(config: TrainConfig, workers: int) -> Batching:
    """Compute the global batch size from the configuration and the number of workers."""
    passes = config.accumulate
    each = f" × {passes} accumulated" if passes > 1 else ""
    if config.global_batch_size is None:
        batch = config.batch_size or DEFAULT_BATCH
        meant = config.batch_workers or workers
        total = batch * meant * passes
        reason = f"{batch} per worker × {plural(meant, 'worker')}{each}"
        if meant != workers:
            passes = max(1, -(-passes * meant // workers))  # so that no pass is larger than with `meant` workers
            reason += f", shared by {workers}" + (f" in {passes} passes" if passes > 1 else "")
        return Batching(total, passes, reason)
    total = config.global_batch_size
    each_pass = f"{total / workers / passes:g} per worker × {plural(workers, 'worker')}{each}"
    return Batching(total, passes, f"as given; {each_pass}")


def build_sharding(config: TrainConfig, data: ImageData, batching: Batching, rank: int, size: int) -> Sharding:
    """Return worker `rank`'s share of each training step."""
    together = 2 if mixes(config.augment) else 1
    return Sharding(
        len(data.train),
        batching.global_batch,
        rank,
        size,
        config.seed,
        config.data.drop_last,
        together,
        batching.accumulate,
    )
