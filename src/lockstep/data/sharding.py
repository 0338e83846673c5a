"""Which samples a worker sees in which step: pure functions of (seed, epoch, step, rank, size).

One permutation of (seed, epoch) is cut into global batches, and each worker takes its share of each. So with a fixed
global batch, any number of workers sees the same samples in the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.data.augment.random_draws import Draws, Indices


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch: 0 .. samples - 1 sorted by a draw each, int64; the same with any version of NumPy."""
    return np.argsort(Draws(seed, epoch, np.arange(samples)).uniform("order"), kind="stable")


def share(count: int, rank: int, size: int) -> slice:
    """The contiguous part of `count` items that belongs to worker `rank`; parts differ by one item at most."""
    return slice(count * rank // size, count * (rank + 1) // size)


@dataclass(frozen=True)
class Sharding:
    """How epochs of `samples` samples are cut into steps of `global_batch` and shared out.

    With `drop_last` the last, smaller batch of an epoch is left out, unless it is the only one. A step is shared out in
    groups of `together` neighbours (2: the pairs that `mixing.py` mixes).
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
        """Samples that an epoch leaves out."""
        return max(0, self.samples - self.steps_per_epoch * self.global_batch)

    def count(self, step: int) -> int:
        """Samples of one step (counted from the epoch's start) over all workers."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def passes(self, step: int, most: int) -> int:
        """Forward passes of one step, up to `most`: as many on every worker, each with a sample at least.

        Workers that meet in a pass, as with synchronised batch norm, would else wait for each other.
        """
        groups = -(-self.count(step) // self.together)
        smallest_share = groups // self.size * self.together - (groups * self.together - self.count(step))
        return max(1, min(most, smallest_share))

    def epoch(self, epoch: int, start_step: int = 0) -> list[Indices]:
        """This worker's samples for each step of an epoch, from `start_step` on. A share may be empty."""
        order = permutation(self.samples, self.seed, epoch)
        shares = []
        for step in range(start_step, self.steps_per_epoch):
            count = self.count(step)
            batch = order[step * self.global_batch :][:count]
            groups = share(-(-count // self.together), self.rank, self.size)
            shares.append(batch[groups.start * self.together : groups.stop * self.together])
        return shares


def evaluation_batches(samples: int, batch: int, rank: int, size: int) -> list[Indices]:
    """This worker's part of an evaluation, in batches: each sample once over all workers, none padded."""
    mine = np.arange(samples, dtype=np.int64)[share(samples, rank, size)]
    return [mine[start : start + batch] for start in range(0, len(mine), batch)]
