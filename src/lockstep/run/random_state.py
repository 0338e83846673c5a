"""The random state of a user's own loop: a function of the seed, the epoch and the step, so none has to be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from weakref import ref
from zlib import crc32

from lockstep.data.exact_loader import ExactLoader
from lockstep.seeding import seed_all, seed_step

NOT_FIRST = (0, 1 << 31)  # the stream of a loader that made room for that of a run


class RandomState:
    """The global generators, a generator with equal numbers on all workers, and the loaders' streams.

    Attributes:
        agreed: See `TrainingWorld.random`.
    """

    def __init__(self) -> None:
        self.agreed = Random(0)
        self._entered = 0  # epochs, up to the current one; 0 outside of them
        self._made = 0  # loaders, in the current epoch or outside
        self._first: Callable[[], ExactLoader | None] = lambda: None

    def add_loader(self, loader: ExactLoader) -> None:
        """Give a new loader its stream, by the number of those made before it.

        Within an epoch, only those made in the epoch count, so that a resumed run gives it the same stream.
        """
        if self._entered or self._made:
            loader.use_stream(self._entered, self._made)
        else:
            self._first = ref(loader)
        self._made += 1

    def name_loaders(self, main: ExactLoader | None, state: Mapping[str, object]) -> None:
        """Give the loaders of a run the streams of their names, whichever loaders were made before them."""
        first, self._first = self._first(), lambda: None
        if main is not None and first is not None and first is not main:
            first.use_stream(*NOT_FIRST)
        if main is not None:
            main.use_stream()
        for name, each in state.items():
            if isinstance(each, ExactLoader):
                each.use_stream(crc32(name.encode()))

    @contextmanager
    def epochs_entered(self) -> Iterator[None]:
        """Count the loaders made in epochs apart."""
        before = self._entered, self._made
        try:
            yield
        finally:
            self._entered, self._made = before

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Seed the generators for what comes before an epoch's steps, equally on all workers."""
        self._entered, self._made = epoch + 1, 0
        seed_all(seed, epoch, 0, 0)
        self.agreed.seed(f"{seed} {epoch}")

    def begin_step(self, seed: int, epoch: int, step: int, rank: int, agrees: bool) -> None:
        """Seed the generators for a step of an epoch, from 0, the global ones differently on each worker.

        Args:
            agrees: Whether to seed `agreed`, too.
        """
        seed_step(seed, epoch, step + 1, rank)
        if agrees:
            self.agreed.seed(f"{seed} {epoch} {step}")
