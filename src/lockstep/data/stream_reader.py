"""Reading during training, by loader processes: decode files, or read items of a custom data set.

Pixels are passed as uint8 and normalized on the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from lockstep.config.schema import AugmentConfig
from lockstep.data.decode import Cut, Size, decode, evaluation_pixels, unless_skipped
from lockstep.data.loader_processes import LoaderProcesses, begin_loader
from lockstep.data.random_draws import Draws, Indices
from lockstep.data.readers import Normalizer, Placement, change_at_random, loader_error, lost_loaders_named
from lockstep.data.sets import NO_IMAGES, Batch, EncodedSplit, InputSpec, UserSplit, class_index
from lockstep.data.transforms import RandomCrop, erase_, mirrored
from lockstep.errors import CorruptImageError, DataError, first_line
from lockstep.models.nested import cast, leaves, map_tensors
from lockstep.seeding import seed_all
from lockstep.world import accelerator

PREFETCHED = 2  # batches of a loader process
BATCHES_UNDER_WAY = PREFETCHED + 1  # and one in use by the parent


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor of a loader process to shared memory, for passing it to the parent.

    If the multiprocessing queue did this, an error would occur in its thread, and the parent would wait forever.

    Raises:
        DataError: Shared memory is full.
    """
    if get_worker_info() is None:
        return tensor
    try:
        tensor.share_memory_()
    except RuntimeError as error:
        raise _shared_memory_full(tensor, error) from None
    return tensor


def _shared_memory_full(batch: Any, error: Exception) -> DataError:
    size = sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    return DataError(
        f"shared memory is full: a loader process needs {size / 2**20:,.0f} MiB per batch and keeps "
        f"{BATCHES_UNDER_WAY} batches ({first_line(error)}); enlarge /dev/shm (docker run --shm-size), or lower "
        f"--workers or --batch-size"
    )


class SharedRing:
    """A ring of shared-memory buffers, in which a loader process passes batches to the parent without a copy.

    The parent must finish with a batch before it requests the next one.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._last = 0  # the buffer of the last batch

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """Return an uninitialized uint8 tensor; outside a loader process, a new one in private memory.

        Raises:
            DataError: Shared memory is full.
        """
        size = math.prod(shape)
        if get_worker_info() is None:
            return torch.empty(*shape, dtype=torch.uint8, device="cpu")
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [
                share(torch.empty(size, dtype=torch.uint8, device="cpu")) for _ in range(BATCHES_UNDER_WAY)
            ]
        self._last = (self._last + 1) % BATCHES_UNDER_WAY
        return self._buffers[self._last][:size].view(*shape)


class BatchRequest(NamedTuple):
    """A request for one batch: its samples and epoch (None: evaluation)."""

    epoch: int | None
    samples: Indices


class RawImages(NamedTuple):
    """One batch from a loader process: images [N, C, H, W] or others' inputs, labels [N], and the files that failed.

    Images are in shared memory and valid until the next batch is requested. If the device decodes, `images` is an
    `Encoded`, which `Finish` turns into images.
    """

    images: Any
    labels: Any  # int64, or nested tensors that are not classes
    corrupt: dict[int, tuple[str, str]]  # position in the batch: (path, message)


class Source(Protocol):
    """Makes batches in a loader process."""

    def __getitems__(self, request: BatchRequest) -> RawImages: ...


Finish = Callable[[BatchRequest, RawImages], RawImages]


class FileSource:
    """Decodes, crops and flips encoded images."""

    def __init__(self, split: EncodedSplit, spec: InputSpec, config: AugmentConfig, seed: int):
        self._split, self._spec, self._config, self._seed = split, spec, config, seed
        self.size: Size = (spec.width, spec.height)
        self._buffers = SharedRing()

    def __getitems__(self, request: BatchRequest) -> RawImages:
        evaluates, (width, height) = request.epoch is None, self.size
        cuts, flipped = ([], ()) if evaluates else self.plan(request)
        pixels = self._buffers.take((len(request.samples), height, width, self._spec.channels)).permute(0, 3, 1, 2)
        corrupt = {}
        for position, sample in enumerate(request.samples.tolist()):
            file = self._split.image(sample)
            try:
                if evaluates:
                    image = evaluation_pixels(file, self._spec)
                else:
                    image = decode(file, self._spec.channels, cuts[position], self.size, self._spec.bits)
            except CorruptImageError as error:
                corrupt[position] = (self._split.name(sample), str(error))
                pixels[position] = 0
            else:
                planes = torch.from_numpy(image).permute(2, 0, 1)
                pixels[position] = planes.flip(2) if not evaluates and flipped[position] else planes
        return RawImages(pixels, self.labels(request), corrupt)

    def plan(self, request: BatchRequest) -> tuple[list[Cut], npt.NDArray[np.bool_]]:
        """Return each training image's crop, and which images are flipped."""
        draws = Draws(self._seed, request.epoch or 0, request.samples)
        crop = RandomCrop(draws, self._config.min_crop)
        cuts: list[Cut] = [partial(crop.box, position) for position in range(len(request.samples))]
        return cuts, mirrored(draws, self._config) & self._config.flip

    def labels(self, request: BatchRequest) -> Indices:
        return np.array([self._split.labels[sample] for sample in request.samples], np.int64)


class UserSource:
    """Reads items of a custom data set, whose random numbers are seeded by (seed, epoch, sample)."""

    def __init__(self, split: UserSplit, seed: int):
        self._split, self._seed = split, seed

    def __getitems__(self, request: BatchRequest) -> RawImages:
        items = []
        for sample in request.samples.tolist():
            seed_all(self._seed, request.epoch or 0, sample)
            items.append(self._split.dataset[sample])
        try:
            inputs, targets = self._split.batch_of(items)
        except ValueError as error:
            if "shared memory" in str(error):  # torch's default_collate puts tensors there
                raise _shared_memory_full(items, error) from None
            raise DataError(
                f"items {request.samples[:4].tolist()}... of the data set cannot be batched as (inputs, target): "
                f"{error}; make their tensors equal in shape, or pass collate_fn= to fit"
            ) from None
        targets = self._class_indices(request, targets) if self._split.classes else map_tensors(share, targets)
        return RawImages(map_tensors(share, inputs), targets, {})

    def _class_indices(self, request: BatchRequest, labels: Sequence[Any]) -> Indices:
        indices = np.empty(len(labels), np.int64)
        for position, (sample, label) in enumerate(zip(request.samples.tolist(), labels, strict=True)):
            try:
                indices[position] = class_index(label, self._split.classes)
            except ValueError as error:
                role = "validation" if request.epoch is None else "training"
                raise DataError(f"item {sample} of the {role} set has {error}") from None
        return indices


class StreamReader:
    """Reads batches from a source in `processes` loader processes (0: in this process)."""

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
        """`augment`: augmentation of uint8 training images on the device; the source does the rest."""
        self._augment, self._seed = augment or AugmentConfig(), seed
        self.batches_ahead = PREFETCHED * processes
        self._placement = placement
        self._normalize = Normalizer(spec, placement) if spec != NO_IMAGES else None
        self._skip_corrupt = skip_corrupt
        self._finish = finish
        self._passes = 0
        self.left_out: set[str] = set()
        self._processes = LoaderProcesses(
            source,
            begin_loader,
            num_workers=processes,
            prefetch_factor=PREFETCHED if processes else None,
            pin_memory=accelerator.overlaps(placement.device),
            # A callback may change a custom data set between epochs, which processes that stay would not see.
            persistent_workers=processes > 0 and not isinstance(source, UserSource),
        )

    def read(self, plan: Sequence[Indices], epoch: int | None) -> Iterator[Batch]:
        self._passes += 1
        number = self._passes
        batches = self._processes.start(BatchRequest(epoch, samples) for samples in plan)
        with self._errors_named():
            for samples in plan:
                if self._passes != number:
                    raise DataError(
                        "another pass over these images has started; finish one pass before starting the next"
                    )
                yield self._batch(next(batches), BatchRequest(epoch, samples))

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Raise an error of a loader process without torch's traceback, and LoaderError if one exited."""
        with lost_loaders_named():
            try:
                yield
            except DataError as error:
                if "Original Traceback" not in str(error):  # added by torch to an error in a loader process
                    raise
                lines = str(error).splitlines()
                raise DataError(lines[-1].removeprefix(f"{DataError.__module__}.DataError: ")) from None
            except (ConnectionError, EOFError) as error:  # while receiving the descriptor of a tensor
                if not self._processes.count or "Original Traceback" in str(error):  # raised by the data set
                    raise
                self.close()  # torch's own error about the process may follow at any moment until then
                raise loader_error(error) from error

    def _batch(self, raw: RawImages, request: BatchRequest) -> Batch:
        device = self._placement.device
        raw = self._finish(request, raw) if self._finish else raw
        labels: Any = raw.labels
        if isinstance(labels, np.ndarray):
            labels = torch.from_numpy(labels)
            if accelerator.overlaps(device):  # an unpinned copy would wait for the copy of the images
                labels = labels.pin_memory()
        images, labels = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (raw.images, labels))
        labels = cast(labels, self._placement.loss_dtype)
        if self._normalize is None:
            images = cast(images, self._placement.dtype)
        elif images.dtype == torch.uint8:
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
        """Shut down the loader processes, even in the middle of a pass."""
        self._processes.close()
