"""The global batch size and the passes per step, with the reason to print, and the shares of the workers."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.schema import TrainConfig
from lockstep.data.augment.mixing import mixes
from lockstep.data.sets import ImageData
from lockstep.data.sharding import Sharding
from lockstep.errors import plural

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
    return Sharding(len(data.train), batching.global_batch, rank, size, config.seed, config.data.drop_last, together)
