"""Assign samples to steps and workers, by pure functions of (seed, epoch, step, rank, size).

One permutation, seeded by (seed, epoch), is split into global batches, and each worker takes its share of each. So with
a fixed global batch size, the samples of each step do not depend on the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.data.random_draws import Draws, Indices


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return an epoch's sample order, int64: 0 .. samples - 1 sorted by random keys, for any version of NumPy."""
    return np.argsort(Draws(seed, epoch, np.arange(samples)).uniform("order"), kind="stable")


def share(count: int, rank: int, size: int) -> slice:
    """Return worker `rank`'s contiguous part of `count` items; parts differ by at most one item."""
    return slice(count * rank // size, count * (rank + 1) // size)


@dataclass(frozen=True)
class Sharding:
    """Splits epochs of `samples` samples into steps of `global_batch`, and steps among the workers.

    With `drop_last`, the last, smaller batch of an epoch is dropped, unless it is the only one. Each group of
    `together` adjacent samples of a step goes to one worker (2: the pairs that `transforms.Mixing` mixes).
    """

    samples: int
    global_batch: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    drop_last: bool = False
    together: int = 1

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.global_batch)
        return whole + (rest > 0 and not (self.drop_last and whole > 0))

    @property
    def dropped(self) -> int:
        """Number of samples that an epoch drops."""
        return max(0, self.samples - self.steps_per_epoch * self.global_batch)

    def count(self, step: int) -> int:
        """Return the number of samples of a step (counted from the epoch's start) over all workers."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def passes(self, step: int, most: int) -> int:
        """Return the number of forward passes of a step, at most `most`: equal on all workers, with samples in each.

        With different counts, collectives in the forward pass, such as those of synchronized batch norm, would hang.
        """
        groups = -(-self.count(step) // self.together)
        smallest_share = groups // self.size * self.together - (groups * self.together - self.count(step))
        return max(1, min(most, smallest_share))

    def smallest_pass(self, step: int, most: int) -> int:
        """Return the fewest samples in any worker's forward pass of a step, for up to `most` passes.

        A worker without samples gets one of weight 0.
        """
        shares = [self._share(step, rank) for rank in range(self.size)]
        return max(1, min(stop - start for start, stop in shares) // self.passes(step, most))

    def _share(self, step: int, rank: int) -> tuple[int, int]:
        """Return where worker `rank`'s part of a step's samples starts and stops."""
        count = self.count(step)
        groups = share(-(-count // self.together), rank, self.size)
        return groups.start * self.together, min(groups.stop * self.together, count)

    def epoch(self, epoch: int, start_step: int = 0) -> list[Indices]:
        """Return this worker's samples for each step of an epoch, from `start_step` on. A share may be empty."""
        order = permutation(self.samples, self.seed, epoch)
        return [order[self.places(step)] for step in range(start_step, self.steps_per_epoch)]

    def places(self, step: int) -> slice:
        """Return where this worker's share of a step is in the order of the epoch."""
        start, stop = self._share(step, self.rank)
        return slice(step * self.global_batch + start, step * self.global_batch + stop)


def evaluation_batches(samples: int, batch: int, rank: int, size: int) -> list[Indices]:
    """Return this worker's batches of an evaluation. All workers together see each sample once, without padding."""
    mine = np.arange(samples, dtype=np.int64)[share(samples, rank, size)]
    return [mine[start : start + batch] for start in range(0, len(mine), batch)]
