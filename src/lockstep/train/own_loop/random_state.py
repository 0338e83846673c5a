"""The random state of a user's own loop: a function of the seed, the epoch and the step, so none has to be saved."""

from __future__ import annotations

from random import Random

from lockstep.seeding import seed_all


class RandomState:
    """The global generators, and a generator with equal numbers on all workers.

    Attributes:
        agreed: See `TrainingWorld.random`.
    """

    def __init__(self) -> None:
        self.agreed = Random(0)

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Seed the generators for what comes before an epoch's steps, equally on all workers."""
        seed_all(seed, epoch, 0, 0)
        self.agreed.seed(f"{seed} {epoch}")

    def begin_step(self, seed: int, epoch: int, step: int, rank: int, agrees: bool) -> None:
        """Seed the generators for a step of an epoch, from 0, the global ones differently on each worker.

        Args:
            agrees: Whether to seed `agreed`, too.
        """
        seed_all(seed, epoch, step + 1, rank)
        if agrees:
            self.agreed.seed(f"{seed} {epoch} {step}")
