"""Assign samples to steps and workers, by pure functions of (seed, epoch, step, rank, size).

One permutation, seeded by (seed, epoch), is split into global batches, and each worker takes its share of each. So with
a fixed global batch size, the samples of each step do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lockstep.data.random_draws import Draws, Indices


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return an epoch's sample order, int64: 0 .. samples - 1 sorted by random keys, for any version of NumPy."""
    return np.argsort(Draws(seed, epoch, np.arange(samples)).uniform("order"), kind="stable")


def share(count: int, rank: int, size: int) -> slice:
    """Return worker `rank`'s contiguous part of `count` items; parts differ by at most one item."""
    return slice(count * rank // size, count * (rank + 1) // size)


def cut(count: int, fractions: Sequence[float], least: int) -> list[int]:
    """Return the ends of the parts of `count` items, of at least `least` items, and otherwise in these proportions."""
    wanted = [max(0.0, fraction * count - least) for fraction in fractions]
    sums = list(accumulate(wanted))  # not `sum`, whose rounding depends on Python's version
    if not sums[-1]:
        return [share(count, rank, len(fractions)).stop for rank in range(len(fractions))]
    spare = count - least * len(fractions)
    ends = [least * rank + int(spare * part / sums[-1] + 0.5) for rank, part in enumerate(sums, start=1)]
    return [*ends[:-1], count]


@dataclass(frozen=True)
class Sharding:
    """Splits epochs of `samples` samples into steps of `global_batch`, and steps among the workers.

    With `drop_last`, the last, smaller batch of an epoch is dropped, unless it is the only one. Each group of
    `together` adjacent samples of a step goes to one worker (2: the pairs that `transforms.Mixing` mixes). A step has
    up to `passes_per_step` forward passes. `fractions` are the workers' shares of a step, with a sum of 1; empty: equal
    shares.
    """

    samples: int
    global_batch: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    drop_last: bool = False
    together: int = 1
    passes_per_step: int = 1
    fractions: tuple[float, ...] = ()

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

    def passes(self, step: int) -> int:
        """Return the number of forward passes of a step: equal on all workers, with samples in each.

        With different counts, collectives in the forward pass, such as those of synchronized batch norm, would hang. It
        does not depend on `fractions`.
        """
        groups = self._groups(step)
        smallest_share = groups // self.size * self.together - (groups * self.together - self.count(step))
        return max(1, min(self.passes_per_step, smallest_share))

    def smallest_pass(self, step: int) -> int:
        """Return the fewest samples in any worker's forward pass of a step.

        A worker without samples gets one of weight 0.
        """
        return max(1, min(self.counts(step)) // self.passes(step))

    @property
    def smallest_fraction(self) -> float:
        """The least fraction that `fractions` should have: a smaller one would be raised."""
        return self._least(0) / self._groups(0)

    def counts(self, step: int = 0) -> list[int]:
        """Return the number of samples of each worker in a step; the first one is whole."""
        ends = [min(end * self.together, self.count(step)) for end in self._ends(step)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _groups(self, step: int) -> int:
        return -(-self.count(step) // self.together)

    def _least(self, step: int) -> int:
        """Return the fewest groups that `fractions` can give a worker: two samples in each forward pass, if possible.

        Batch norm needs two, and a worker whose speed is unknown needs some.
        """
        even = self._groups(step) // self.size
        return min(even, max(2 * self.passes_per_step, even // 8))

    def _ends(self, step: int) -> list[int]:
        """Return where each worker's part of a step's groups stops."""
        groups = self._groups(step)
        if self.fractions:
            return cut(groups, self.fractions, self._least(step))
        return [share(groups, rank, self.size).stop for rank in range(self.size)]

    def epoch(self, epoch: int, start_step: int = 0) -> list[Indices]:
        """Return this worker's samples for each step of an epoch, from `start_step` on. A share may be empty."""
        order = permutation(self.samples, self.seed, epoch)
        return [order[self.places(step)] for step in range(start_step, self.steps_per_epoch)]

    def places(self, step: int) -> slice:
        """Return where this worker's share of a step is in the order of the epoch."""
        if self.fractions:
            groups = slice(*[0, *self._ends(step)][self.rank : self.rank + 2])
        else:
            groups = share(self._groups(step), self.rank, self.size)
        first = step * self.global_batch
        stop = min(groups.stop * self.together, self.count(step))
        return slice(first + groups.start * self.together, first + stop)


def evaluation_batches(samples: int, batch: int, rank: int, size: int) -> list[Indices]:
    """Return this worker's batches of an evaluation. All workers together see each sample once, without padding."""
    mine = np.arange(samples, dtype=np.int64)[share(samples, rank, size)]
    return [mine[start : start + batch] for start in range(0, len(mine), batch)]
