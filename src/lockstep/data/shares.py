"""How an epoch's order is cut into a worker's batches: for training with exact weights, and for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from lockstep.data.random_draws import Draws, Indices
from lockstep.data.seeded_samples import digest_of, generators_kept, seed_generators
from lockstep.data.sharding import Sharding, permutation, share
from lockstep.errors import DataError
from lockstep.world.world import World


class Part(NamedTuple):
    """A batch of this worker, which is its part of a step or, with accumulation, of several batches of a step.

    Attributes:
        places: Where its samples are in the order of the epoch, one after another, int64 [N].
        weight: The factor of the mean loss over this batch in the mean over the global batch, times the workers.
        starts_step: Whether it is the step's first batch.
        completes_step: Whether it is the last.
        is_filler: Whether its only sample must not count, because this worker has none in the step.
    """

    places: Indices
    weight: float
    starts_step: bool
    completes_step: bool
    is_filler: bool = False

    @property
    def samples(self) -> int:
        """The number of samples that count."""
        return 0 if self.is_filler else len(self.places)


@dataclass(frozen=True)
class Shares:
    """How epochs are cut into this worker's batches for training."""

    world: World
    sharding: Sharding
    shuffle: bool
    sampler: Sampler[int] | None
    balances: bool = False

    def order(self, epoch: int) -> Indices:
        """Return the epoch's samples. Collective if there is a sampler.

        Raises:
            DataError: The sampler's order differs between two calls, or between workers, or has another length.
        """
        if self.sampler is None:
            count = self.sharding.samples
            return permutation(count, self.sharding.seed, epoch) if self.shuffle else np.arange(count)
        order = self._draw(epoch)
        if len(order) != self.sharding.samples:
            raise DataError(
                f"the sampler announced {self.sharding.samples:,} samples, but epoch {epoch} has {len(order):,}"
            )
        if not np.array_equal(order, self._draw(epoch)):
            raise DataError(
                "sampler=: its order differs when it is drawn again with the same seeds; draw from the global "
                "generators, or from an attribute `generator`, in its __iter__"
            )
        if len(set(self.world.gather(digest_of([order])))) > 1:
            raise DataError(
                "sampler=: its order differs between the workers; it must cover the whole data set, with the same "
                "order on each worker, from which the loader takes the worker's share"
            )
        return order

    def _draw(self, epoch: int) -> Indices:
        assert self.sampler is not None
        seed = int(Draws(self.sharding.seed, epoch, np.zeros(1, np.int64)).bits("sampler")[0])
        if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        with generators_kept():
            seed_generators(seed)
            return np.fromiter(self.sampler, dtype=np.int64)

    @property
    def steps(self) -> int:
        """The number of steps of an epoch."""
        return self.sharding.steps_per_epoch

    def parts(self, step: int) -> list[Part]:
        """Return this worker's batches of a step."""
        sharding = self.sharding
        place, count = sharding.places(step), sharding.count(step)
        if place.start == place.stop:  # fewer samples than workers: it must take part in the step
            return [Part(np.array([step * sharding.global_batch]), 0.0, True, True, is_filler=True)]
        whole = np.arange(place.start, place.stop)
        pieces = np.array_split(whole, sharding.passes(step)) if sharding.passes_per_step > 1 else [whole]
        return [
            Part(places, len(places) * sharding.size / count, number == 1, number == len(pieces))
            for number, places in enumerate(pieces, start=1)
        ]

    @property
    def needs_weights(self) -> bool:
        """Whether the mean of the workers' mean losses can differ from the mean over the global batch."""
        steps = {0, self.sharding.steps_per_epoch - 1}
        return (
            self.balances
            or self.sharding.passes_per_step > 1
            or any(self.sharding.count(step) % self.sharding.size for step in steps)
        )


@dataclass(frozen=True)
class EvaluationShares:
    """How an evaluation is cut: each sample once, and as many batches for each worker where that is possible.

    The workers' numbers of samples differ by at most one, and so do those of a worker's batches.
    """

    samples: int
    batch: int
    rank: int
    size: int

    def order(self, epoch: int) -> Indices:
        return np.arange(self.samples)

    @property
    def steps(self) -> int:
        """The number of this worker's batches."""
        return min(self._most_batches, len(self._mine))

    def parts(self, step: int) -> list[Part]:
        """Return a batch."""
        piece = share(len(self._mine), step, self.steps)
        return [Part(np.array(self._mine[piece]), 1.0, True, True)]

    @property
    def _mine(self) -> range:
        return range(self.samples)[share(self.samples, self.rank, self.size)]

    @property
    def is_even(self) -> bool:
        """Whether all workers have the same number of batches."""
        return self.samples // self.size >= self._most_batches

    @property
    def _most_batches(self) -> int:
        most_samples = -(-self.samples // self.size)
        return -(-most_samples // self.batch)

    needs_weights = False
