"""A loader over any data set: exact shares for any number of workers, and a position from which to go on.

It is torch's DataLoader with three differences. The order of an epoch is cut into global batches, and each worker gets
its share of each, so that the samples of a step do not depend on the number of workers. The generators of Python, NumPy
and torch are seeded before each sample, by its place in the order, so that random augmentation does not either. An
epoch can start at any step. Iterable data sets are read whole by each worker, which leaves out the others' samples.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from lockstep.data.loader_processes import LoaderProcesses, begin_loader
from lockstep.data.random_draws import Draws, Indices
from lockstep.data.seeded_samples import Request, SeededSet, StreamSet, begin_with, digest_of, generators_kept
from lockstep.data.sharding import Sharding
from lockstep.data.shares import EvaluationShares, Part, Shares
from lockstep.errors import ConfigError, DataError
from lockstep.models.nested import map_tensors
from lockstep.world import accelerator
from lockstep.world.world import World

OPTIONS = {*inspect.signature(DataLoader).parameters} - {"dataset"}
OWN_GENERATORS = (
    "is random in a way that the loader cannot repeat: a sample or batch, made twice with the same seeds, differed. So "
    "its samples depend on the number of workers, and change when a run is resumed. In __getitem__ and collate_fn, "
    "draw from the global generators of torch, random or numpy.random, or pass seed_sample=, which seeds yours"
)


# An augmentation of one sample in ten by a generator of its own makes a sample differ with probability 0.19. So 64
# samples that are read again miss it in 1 of 700,000 jobs; a set of 8 samples, each read 9 times, in 1 of 2,000.
CHECKED_READS, CHECKED_IN_BATCH = 64, 8
DRAWN = 1 << 14  # seeds of samples, drawn at once: those of a batch alone take 14 µs, however few


class ExactLoader:
    """Batches of this worker, on its device; see `lockstep.TrainingWorld.loader`.

    Each pass over it is the next epoch. Within `TrainingRun.epochs`, the run sets the epoch and where it starts.

    Attributes:
        dataset: The data set.
        between: Called before each batch is made.
        ended: Called after the last batch of a pass.
        left: Called when a pass is left before its last batch.
        seed_step: Called after the first batch of a step was made, instead of restoring the generators (77 µs).
        is_passing: Whether a pass was started and is not complete.
        steps_done: The steps of the epoch whose last batch was delivered, with those before the pass started:
            count on from it in `enumerate(train, train.steps_done)`, since a resumed pass is shorter.
        next_step: The first step of the epoch of which no batch has been requested from the loader processes.
        passes: How many passes have started.
        all: Those of the process.
    """

    all: ClassVar[WeakSet[ExactLoader]] = WeakSet()

    def __init__(
        self,
        samples: SeededSet | StreamSet,
        shares: Shares | EvaluationShares,
        *,
        seed: int,
        device: torch.device | None,
        warn: Callable[[str], None],
        worker_init_fn: Callable[[int], None] | None = None,
        **options: Any,
    ):
        """`device`: where to copy the batches; None: leave them. `options`: those of DataLoader."""
        self.all.add(self)
        self.shares, self._given_seed, self._seed, self._device = shares, seed, seed, device
        self.dataset, self._name, self._warn = samples.dataset, type(samples.dataset).__name__, warn
        self._is_stream = isinstance(samples, StreamSet)
        begin = partial(begin_with, worker_init_fn, samples.dataset) if worker_init_fn else begin_loader
        self._processes = LoaderProcesses(samples, begin, **options)
        self._epoch = self._start_step = self.passes = self.next_step = self.steps_done = self._taken = 0
        self.is_passing = self._has_warned = self._has_weighed = False
        self._cuts: list[tuple[int, Shares | EvaluationShares]] = []  # of the current pass, and their first steps
        self._checks = CHECKED_READS if self.sharding else CHECKED_IN_BATCH  # of samples, in the first requests
        if self._is_stream:
            self._checks = max(1, self._processes.count)
        self._digest, self.order = "", dict[str, str]()  # of a stream's first items, and of what a sampler gave
        self._part: Part | None = None
        self._coming: Part | None = None
        self._wait_seconds = 0.0
        self.between: Callable[[], None] = lambda: None
        self.ended: Callable[[], None] = lambda: None
        self.left: Callable[[], None] = lambda: None
        self.seed_step: Callable[[], None] | None = None
        self._samples = samples

    def use_stream(self, *stream: int) -> None:
        """Draw other numbers in training than loaders of the same seed with other streams; none: those of the seed."""
        if isinstance(self.shares, Shares):
            mixed = np.random.SeedSequence((self._given_seed, *stream)).generate_state(1)
            self._seed = int(mixed[0]) if stream else self._given_seed
            self.shares = replace(self.shares, sharding=replace(self.shares.sharding, seed=self._seed))

    @property
    def sharding(self) -> Sharding | None:
        """How the epochs are cut into steps; None in an evaluation."""
        return self.shares.sharding if isinstance(self.shares, Shares) else None

    @property
    def batch_size(self) -> int:
        """The number of samples in this worker's batches, if the workers' shares are equal."""
        if isinstance(self.shares, EvaluationShares):
            return self.shares.batch
        sharding = self.shares.sharding
        return -(-sharding.global_batch // (sharding.size * sharding.passes_per_step))

    @property
    def sampler(self) -> Sampler[int] | None:
        """The sampler that was passed, or one of torch's that only has its length; None for an iterable data set."""
        shares = self.shares if isinstance(self.shares, Shares) else None
        if self._is_stream or (shares and shares.sampler is not None):
            return shares.sampler if shares else None
        return RandomSampler(self.dataset) if shares and shares.shuffle else SequentialSampler(self.dataset)

    def __len__(self) -> int:
        """The number of this worker's batches of an epoch."""
        steps = self.shares.steps
        return (steps - 1) * len(self.shares.parts(0)) + len(self.shares.parts(steps - 1)) if steps else 0

    @property
    def weight(self) -> float:
        """The factor for the mean loss over the current batch; 1 if all workers have as many samples in the step.

        The average of the workers' gradients is then that of the global batch. `TrainingRun.backward` multiplies by it.
        """
        self._has_weighed = True
        return self.part.weight

    @property
    def completes_step(self) -> bool:
        """Whether the current batch is the last of its step: with `accumulate`, the others come before it."""
        return self.part.completes_step

    @property
    def samples(self) -> int:
        """The number of this worker's samples in the current batch that count: 0 if it only takes part in the step."""
        return self.part.samples

    @property
    def part(self) -> Part:
        """The current batch.

        Raises:
            DataError: There is none yet.
        """
        if self._part is None:
            raise DataError("the loader has not delivered a batch yet: iterate over it first")
        return self._part

    @property
    def has_batch(self) -> bool:
        """Whether a batch of the current or last pass was delivered."""
        return self._part is not None

    @property
    def is_within_step(self) -> bool:
        """Whether the current batch has others of its step after it."""
        return self._part is not None and not self._part.completes_step

    @property
    def will_complete_step(self) -> bool:
        """Whether the batch that comes next is the last of its step."""
        return self._coming is not None and self._coming.completes_step

    def take_times(self) -> tuple[int, float]:
        """Return the samples delivered since the last call, and the seconds spent waiting for them."""
        taken = self._taken, self._wait_seconds
        self._taken, self._wait_seconds = 0, 0.0
        return taken

    @property
    def balances(self) -> bool:
        """Whether the workers' shares follow their speeds."""
        return isinstance(self.shares, Shares) and self.shares.balances

    @property
    def prefetches(self) -> bool:
        """Whether batches are loaded while others are in use."""
        return self._processes.count > 0

    @property
    def lacks_weights(self) -> bool:
        """Whether the loss must be weighted, but the weight was not read."""
        return not self._has_weighed and self.shares.needs_weights

    def begin(self, epoch: int, start_step: int = 0) -> None:
        """Set the epoch of the next pass, and the step at which it starts."""
        self._epoch, self._start_step = epoch, start_step
        self.steps_done = start_step

    def state_dict(self) -> dict[str, int]:
        """Return the position, for a second loader: pass it to `TrainingWorld.run` by a name of its own."""
        if self.is_passing:
            return {"epoch": self._epoch - 1, "step": self.steps_done}
        return {"epoch": self._epoch, "step": self._start_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start the next pass where another loader was."""
        self.begin(state["epoch"], state["step"])

    def __iter__(self) -> Iterator[Any]:
        late = OPTIONS & {*vars(self)}
        if late or self.dataset is not self._samples.dataset:
            raise ConfigError(
                f"loader.{min(late, default='dataset')}: set too late to have an effect; make another loader with it"
            )
        batches = self._pass()
        next(batches)
        return batches

    def _pass(self) -> Iterator[Any]:
        """Yield once, then the batches. A pass that is left before these is over, too, as by `zip` in a resumed run."""
        passes = self.passes
        try:
            yield None
        except GeneratorExit:
            if passes == self.passes:  # else, a later pass has started
                self.begin(self._epoch + 1 if self.sharding else 0)
            return
        epoch, start = self._epoch, self._start_step
        # Every evaluation has the same samples, so a resumed run's are those of an undisturbed one.
        self.begin(epoch + 1 if self.sharding else 0)
        self.passes += 1
        number, self._cuts = self.passes, [(start, self.shares)]
        parts, requested = tee(self._parts(start))
        order, is_left = self.shares.order(epoch), start < self.shares.steps and getattr(self.shares, "sampler", None)
        self.order = {f"the order of epoch {epoch + 1}": digest_of([order])} if is_left else {}
        requests = self._make_requests(requested, order, epoch, start)
        self.steps_done, self._part, self.next_step = start, None, start
        self.is_passing, self._digest = True, ""  # of this epoch; another one's items may be in another order
        batches = self._processes.start(requests) if start < self.shares.steps else iter(())
        is_left = True
        try:
            for part in parts:
                if number != self.passes:
                    raise DataError("another pass over this loader has started; finish one before the next")
                self._coming = part
                self.between()
                began = time.perf_counter()
                found, batch = _next(batches, None if self.is_within_step else self.seed_step, self.prefetches)
                self._wait_seconds += time.perf_counter() - began
                if found and self._is_stream:
                    self._compare(found)
                elif found and not self._has_warned:
                    self._checks, self._has_warned = 0, True
                    self._warn(f"{self._name} {OWN_GENERATORS}")
                self._part = part
                self._taken += part.samples
                self.steps_done += part.completes_step
                yield batch if self._device is None else _moved(batch, self._device)
            is_left = False
            self.ended()
        finally:
            requests.close()  # it refers to this loader, whose processes would live until garbage is collected
            if number == self.passes:
                self.is_passing = False
                if is_left:
                    self.left()

    def _compare(self, digest: str) -> None:
        """Compare a stream's first items in the loader processes, and in the workers if these have equal batches."""
        digests = {self._digest or digest, digest}
        if not self._digest and isinstance(self.shares, Shares):
            digests |= set(self.shares.world.gather(digest))
        self._digest = digest
        if len(digests) > 1:
            raise DataError(
                f"{self._name}: its items differ between workers or loader processes. Each must read all items: leave "
                f"out sharding of its own (by rank, or by get_worker_info), and draw only from the global generators"
            )

    def close(self) -> None:
        """Shut down the loader processes; the next pass starts new ones."""
        self._processes.close()

    def _parts(self, start: int) -> Iterator[Part]:
        for step in range(start, self.shares.steps):
            shares = next(shares for first, shares in reversed(self._cuts) if first <= step)
            yield from shares.parts(step)

    def _make_requests(self, parts: Iterator[Part], order: Indices, epoch: int, start: int) -> Generator[Request]:
        spread = -(-self._checks // max(1, self.shares.steps - start))
        of_epoch = int(Draws(self._seed, epoch, np.zeros(1, np.int64)).bits("stream")[0])
        drawn, first = np.zeros(0, np.uint64), 0
        for part in parts:
            self.next_step += part.starts_step
            start, stop = int(part.places[0]), int(part.places[-1]) + 1
            if stop > first + len(drawn):  # later ones follow in order
                first, places = start, np.arange(start, min(len(order), start + max(DRAWN, len(part.places))))
                drawn = Draws(self._seed, epoch, places).bits("sample")
            seeds = drawn[start - first : stop - first].tolist()
            collate = seeds[0] ^ 0xFFFFFFFFFFFFFFFF  # its complement: drawing another number takes 14 µs
            most = 1 if self._is_stream else max(spread, min(CHECKED_IN_BATCH, len(seeds)))
            checks = min(self._checks, most)
            self._checks -= checks
            yield Request(epoch, of_epoch, order[start:stop].tolist(), seeds, collate, checks)

    def recut(self, fractions: tuple[float, ...], first_step: int) -> None:
        """Change the workers' shares from a step of the epoch on, on all workers; it must not be before `next_step`."""
        assert isinstance(self.shares, Shares)
        self.shares = replace(self.shares, sharding=replace(self.shares.sharding, fractions=fractions))
        self._cuts.append((first_step, self.shares))


def build_loader(
    world: World,
    dataset: Any,
    *,
    batch_size: int | None,
    global_batch: int | None,
    shuffle: bool,
    sampler: Any,
    batch_sampler: None,
    generator: None,
    drop_last: bool,
    accumulate: int,
    evaluate: bool,
    balance: bool,
    length: int | None,
    seed: int,
    seed_sample: Callable[[int], object] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    to_device: bool,
    pin_memory: bool | None,
    warn: Callable[[str], None],
    **options: Any,
) -> ExactLoader:
    """Return a loader; see `lockstep.TrainingWorld.loader` for the arguments.

    Raises:
        ConfigError: The arguments contradict each other.
        DataError: The data set is empty, or iterable without a length.
    """
    name = type(dataset).__name__
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if length is not None and (length < 1 or not is_stream):
        raise ConfigError("length=: the number of an iterable data set's items in an epoch, at least 1")
    if is_stream and (shuffle or sampler is not None):
        raise ConfigError(f"{name} is iterable, so it sets the order itself: leave out shuffle= and sampler=")
    if isinstance(sampler, DistributedSampler):
        raise ConfigError("sampler=: a DistributedSampler is not needed: leave it out, and set shuffle=True")
    if sampler is not None and (shuffle or evaluate):
        raise ConfigError(f"sampler=: leave out {'shuffle=' if shuffle else 'evaluate='}, or the sampler")
    if evaluate and (shuffle or drop_last or accumulate > 1 or balance):
        raise ConfigError(
            "evaluate=True: takes every sample once, in order; leave out shuffle, drop_last, accumulate and balance"
        )
    if batch_sampler is not None:
        raise ConfigError("batch_sampler=: pass the order of its samples by sampler=, and batch_size= or global_batch=")
    if generator is not None:
        raise ConfigError("generator=: pass seed= instead, from which a resumed run draws an epoch's order again")
    if accumulate < 1 or (batch_size is not None and batch_size < 1) or (global_batch is not None and global_batch < 1):
        raise ConfigError("batch_size, global_batch and accumulate must be at least 1")
    if (batch_size is None) == (global_batch is None):
        raise ConfigError("give either batch_size= (per worker) or global_batch= (per step, over all workers)")
    try:
        count = length or len(dataset if sampler is None else sampler)
    except (TypeError, NotImplementedError):
        raise DataError(f"{name} has no length: give the number of samples of an epoch by length=") from None
    if not count:
        raise DataError(f"{name} is empty")
    whole = global_batch or (batch_size or 0) * world.size * accumulate
    shares: Shares | EvaluationShares
    if evaluate:
        shares = EvaluationShares(count, -(-whole // world.size), world.rank, world.size)
    else:
        sharding = Sharding(count, whole, world.rank, world.size, seed, drop_last, passes_per_step=accumulate)
        shares = Shares(world, sharding, shuffle, sampler, balance)
    pins = accelerator.overlaps(world.device) if pin_memory is None else pin_memory
    device = world.device if to_device else None
    collate = collate_fn or default_collate
    samples: SeededSet | StreamSet = SeededSet(dataset, collate, seed_sample)
    if is_stream:
        samples = StreamSet(dataset, collate, seed_sample, count, has_length=length is None)
    return ExactLoader(samples, shares, seed=seed, device=device, pin_memory=pins, warn=warn, **options)


def _next(batches: Iterator[Any], seed_step: Callable[[], None] | None, is_from_process: bool) -> Any:
    with nullcontext() if seed_step or is_from_process else generators_kept():
        batch = next(batches)
    if seed_step is not None:
        seed_step()
    return batch


def _moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors, in nested containers and in objects with `to`, on the device."""
    return map_tensors(lambda each: each.to(device, non_blocking=True), batch, lambda each: hasattr(each, "to"))
