"""Batches that are made while training runs: files decoded, or the user's data set read, in loader processes.

Pixels travel as uint8 and become numbers on the device. The processes are torch's DataLoader's and live as long as the
reader.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from lockstep.config.schema import AugmentConfig
from lockstep.data.augment.crop import RandomCrop
from lockstep.data.augment.geometric import mirrored
from lockstep.data.augment.progressive import Sizes, side_at
from lockstep.data.augment.random_draws import Draws, Indices
from lockstep.data.augment.random_erasing import erase_
from lockstep.data.batch import Batch
from lockstep.data.pipeline.buffers import SharedRing, share
from lockstep.data.pipeline.decode import Cut, Size, decode, evaluation_pixels, unless_skipped
from lockstep.data.pipeline.lost_loaders import loader_error, lost_loaders_named
from lockstep.data.pipeline.readers import Normalizer, Placement, change_at_random
from lockstep.data.sets import EncodedSplit, InputSpec, UserSplit
from lockstep.errors import CorruptImageError, DataError
from lockstep.seeding import seed_all
from lockstep.world import accelerator


class BatchRequest(NamedTuple):
    """One batch to make: which samples, in which epoch (None: evaluation)."""

    epoch: int | None
    samples: Indices


class Raw(NamedTuple):
    """One batch as a loader process hands it over: images [N, C, H, W], labels [N], and the files that failed.

    Images lie in shared memory; they stay as they are until the next batch is asked for. A source that leaves decoding
    to the device hands over something else instead, of which `Finish` makes images.
    """

    images: Any
    labels: Indices
    corrupt: dict[int, tuple[str, str]]  # position in the batch: (path, message)


class Source(Protocol):
    """What runs in a loader process."""

    def __getitems__(self, request: BatchRequest) -> Raw: ...


Finish = Callable[[BatchRequest, Raw], Raw]


class FileSource:
    """Decodes, crops and mirrors encoded images."""

    def __init__(
        self, split: EncodedSplit, spec: InputSpec, config: AugmentConfig, seed: int, sizes: Sizes | None = None
    ):
        self._split, self._spec, self._config, self._seed, self._sizes = split, spec, config, seed, sizes or {}
        self._buffers = SharedRing()

    def __getitems__(self, request: BatchRequest) -> Raw:
        evaluates, size = request.epoch is None, (self._spec.width, self._spec.height)
        cuts, flipped, (width, height) = ([], (), size) if evaluates else self.plan(request)
        pixels = self._buffers.take((len(request.samples), height, width, self._spec.channels)).permute(0, 3, 1, 2)
        corrupt = {}
        for position, sample in enumerate(request.samples.tolist()):
            file = self._split.image(sample)
            try:
                if evaluates:
                    image = evaluation_pixels(file, self._spec)
                else:
                    image = decode(file, self._spec.channels, cuts[position], (width, height))
            except CorruptImageError as error:
                corrupt[position] = (self._split.name(sample), str(error))
                pixels[position] = 0
            else:
                planes = torch.from_numpy(image).permute(2, 0, 1)
                pixels[position] = planes.flip(2) if not evaluates and flipped[position] else planes
        return Raw(pixels, self.labels(request), corrupt)

    def plan(self, request: BatchRequest) -> tuple[list[Cut], npt.NDArray[np.bool_], Size]:
        """For training: the part of each image that is wanted, whether it is mirrored, and the size of all."""
        draws = Draws(self._seed, request.epoch or 0, request.samples)
        crop, side = RandomCrop(draws, self._config.min_crop), side_at(self._sizes, request.epoch)
        return (
            [partial(crop.box, position) for position in range(len(request.samples))],
            mirrored(draws, self._config) & self._config.flip,
            (side, side) if side else (self._spec.width, self._spec.height),
        )

    def labels(self, request: BatchRequest) -> Indices:
        return np.array([self._split.labels[sample] for sample in request.samples], np.int64)


class UserSource:
    """Reads the user's data set, item by item; its augmentation is its own, seeded by (seed, epoch, sample)."""

    def __init__(self, split: UserSplit, seed: int):
        self._dataset, self._seed = split.dataset, seed

    def __getitems__(self, request: BatchRequest) -> Raw:
        items = []
        for sample in request.samples.tolist():
            seed_all(self._seed, request.epoch or 0, sample)
            items.append(self._dataset[sample])
        try:
            images = torch.stack([image for image, _ in items])
            labels = np.array([int(label) for _, label in items], np.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"items {request.samples[:4].tolist()}... of the data set cannot be batched as (image tensor [C, H, "
                f"W], label): {error}"
            ) from None
        return Raw(share(images), labels, {})


class StreamReader:
    """Batches from a source that runs in `processes` loader processes (0: in this one)."""

    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        placement: Placement,
        processes: int,
        skip_corrupt: bool = False,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        finish: Finish | None = None,
    ):
        """`augment`: what is to be done on the device with uint8 training images; the source does the rest."""
        self._augment, self._seed = augment or AugmentConfig(), seed
        self._requests: list[BatchRequest] = []
        self._placement = placement
        self._normalize = Normalizer(spec, placement)
        self._skip_corrupt = skip_corrupt
        self._finish = finish
        self._passes = 0
        self.left_out: set[str] = set()
        # Processes work ahead by themselves; a user's data set draws from the global generators.
        self.any_thread = processes == 0 and isinstance(source, FileSource)
        self._loader: DataLoader[Raw] = DataLoader(
            source,  # type: ignore[arg-type]  # DataLoader asks __getitems__ first, and nothing else of it
            batch_sampler=_Requests(self._requests),  # type: ignore[arg-type]
            num_workers=processes,
            collate_fn=as_it_is,  # type: ignore[arg-type]  # a source hands over whole batches
            pin_memory=accelerator.overlaps(placement.device),
            persistent_workers=processes > 0,
            worker_init_fn=_heed_parent_alone,
        )

    def read(self, plan: Sequence[Indices], epoch: int | None) -> Iterator[Batch]:
        requests = [BatchRequest(epoch, samples) for samples in plan]
        self._requests[:] = requests
        self._passes += 1
        number = self._passes
        with nullcontext() if self._loader._iterator else _sigterm_blocked():  # it keeps its processes
            batches = iter(self._loader)
        try:
            for request in requests:
                if self._passes != number:
                    raise DataError(
                        "a new pass over these images has started, so the previous one cannot continue; finish it first"
                    )
                with lost_loaders_named():
                    batch = self._batch(next(batches), request)
                yield batch
        except DataError as error:
            if "Original Traceback" not in str(error):  # which torch adds to an error of a loader process
                raise
            lines = str(error).splitlines()
            raise DataError(lines[-1].removeprefix(f"{DataError.__module__}.DataError: ")) from None
        except (ConnectionError, EOFError) as error:  # while it handed over a tensor, whose descriptor is asked for
            if not self._loader.num_workers or "Original Traceback" in str(error):  # it comes out of the data set
                raise
            raise loader_error(error) from error

    def _batch(self, raw: Raw, request: BatchRequest) -> Batch:
        device = self._placement.device
        raw = self._finish(request, raw) if self._finish else raw
        labels = torch.from_numpy(raw.labels)
        if accelerator.overlaps(device):  # not pinned, the copy would wait for the images' before it
            labels = labels.pin_memory()
        images, labels = (tensor.to(device, non_blocking=True) for tensor in (raw.images, labels))
        if images.dtype == torch.uint8:
            draws = None if request.epoch is None else Draws(self._seed, request.epoch, request.samples)
            if draws:
                images = change_at_random(images, draws, self._augment)
            images = self._normalize(images)
            if draws and self._augment.random_erasing:
                images = erase_(images, draws, self._augment.random_erasing)
        else:
            images = images.to(self._placement.dtype, memory_format=self._placement.memory_format)
        if not raw.corrupt:
            return Batch(images, labels)
        if not self._skip_corrupt:
            raise unless_skipped(next(iter(raw.corrupt.values()))[1])
        for path, message in raw.corrupt.values():
            logging.getLogger("lockstep").warning(message)
            self.left_out.add(path)
        weights = torch.ones(len(labels), dtype=images.dtype)
        weights[list(raw.corrupt)] = 0
        return Batch(images, labels, weights.to(device))

    def close(self) -> None:
        """End the loader processes, also while a pass is under way."""
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]  # else they live until garbage collection


class _Requests:
    """The batches to make, in torch's form of a batch sampler; `read` fills in the list before each pass."""

    def __init__(self, requests: list[BatchRequest]):
        self._requests = requests

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(list(self._requests))

    def __len__(self) -> int:
        return len(self._requests)


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread while the block runs, and in the processes that it starts, which inherit that.

    In a loader process torch may have started a thread before `_heed_parent_alone` is called: `torch.set_num_threads`
    does so in the child of a process that has called it, too.
    """
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_parent_alone(worker: int) -> None:
    """In a loader process: let signals to the whole process group, which ask for an orderly stop, not break it.

    Ctrl-C goes to all of a terminal's processes, and Slurm signals all of a job step's. A loader process goes on, for
    the step under way needs its batches, and ends when its parent says so, by SIGTERM at the latest.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # which tells a signal's sender; macOS lacks it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def as_it_is(raw: Raw) -> Raw:
    """What a DataLoader does with the batches of a `Source`: nothing."""
    return raw
