"""JPEG decoding on the GPU: loader processes read files and draw crops, the device decodes (nvJPEG) and resizes.

Only for training images: evaluation's crops have fractional edges, and its pixels must be the same on all machines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from lockstep.data.decode import Box, Cut, Pixels, Size, check_scans, decode, open_encoded
from lockstep.data.sets import EncodedSplit, ImageFile, InputSpec
from lockstep.data.stream_reader import BatchRequest, FileSource, RawImages, share
from lockstep.errors import ConfigError, CorruptImageError, LockstepError, first_line
from lockstep.world import accelerator

MODES = {"L": 1, "RGB": 3}  # channels of JPEG files by Pillow mode
MAX_PIXELS = 1 << 26  # a batch of larger images could fill the device; the CPU reduces them in decoding
MAX_SHRINK = 64  # by the antialiasing kernel
TAIL = 1024  # number of bytes at the end to search for the end marker; cameras append data


Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # files, uint8 [bytes] -> images, uint8 [C, H, W]


def batch_decoder(device: torch.device, channels: int) -> Decode:
    """Return torchcodec's decoder for a device, else torchvision's, which torchcodec replaces from 0.29 on."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, RuntimeError):  # not installed, or a library is missing
        from torchvision.io import decode_jpeg  # type: ignore[no-redef]
    return cast(Decode, partial(decode_jpeg, mode="RGB" if channels == 3 else "GRAY", device=device))


class Wanted(NamedTuple):
    """The part of an encoded image to decode: start and end of its file in the batch, crop and flip."""

    start: int
    end: int
    box: Box
    flipped: bool


class Encoded(NamedTuple):
    """A batch of concatenated files, uint8 [bytes]; images that the device cannot decode are in `made` as pixels."""

    files: torch.Tensor
    size: Size
    wanted: dict[int, Wanted]  # by position in the batch
    made: dict[int, Pixels]


class EncodedSource:
    """Reads the files of a batch, and decodes those that are not plain JPEG."""

    def __init__(self, split: EncodedSplit, spec: InputSpec, by_cpu: FileSource):
        self._split, self._channels, self._bits, self._by_cpu = split, spec.channels, spec.bits, by_cpu

    def __getitems__(self, request: BatchRequest) -> RawImages:
        (cuts, flipped), size = self._by_cpu.plan(request), self._by_cpu.size
        files: list[bytes | memoryview] = []
        wanted, made, corrupt, end = {}, {}, {}, 0
        for position, sample in enumerate(request.samples.tolist()):
            image, cut = self._split.image(sample), cuts[position]
            try:
                file = self._plain_jpeg(image, cut)
                if file is None:
                    pixels = decode(image, self._channels, cut, size, self._bits)
                    made[position] = pixels[:, ::-1].copy() if flipped[position] else pixels
                    continue
            except CorruptImageError as error:
                corrupt[position] = (str(image), str(error))
                continue
            encoded, box = file
            wanted[position] = Wanted(end, end + len(encoded), box, bool(flipped[position]))
            files.append(encoded)
            end += len(encoded)
        joined = torch.from_numpy(np.frombuffer(b"".join(files), np.uint8).copy())
        return RawImages(Encoded(share(joined), size, wanted, made), self._by_cpu.labels(request), corrupt)

    def _plain_jpeg(self, file: ImageFile, cut: Cut) -> tuple[bytes | memoryview, Box] | None:
        """Return a complete JPEG file with matching channels, and its crop; None if the CPU must decode it."""
        try:
            encoded = file.read_bytes()
            check_scans(encoded)
            with open_encoded(encoded) as image:  # reads only the header
                plain = image.format == "JPEG" and MODES.get(image.mode) in (self._channels, 1)
                plain = plain and math.prod(image.size) <= MAX_PIXELS
                box = cut(*image.size)
        except LockstepError:
            raise
        except Exception:  # `decode` reports the fault
            return None
        return (encoded, box) if plain and b"\xff\xd9" in bytes(encoded[-TAIL:]) else None


class DeviceDecoder:
    """Decodes a batch on a device; the CPU decodes images that the device rejects."""

    def __init__(self, device: torch.device, channels: int, split: EncodedSplit):
        """Raise ConfigError if the device cannot decode JPEG."""
        self._device, self._channels, self._split = device, channels, split
        self._decode = batch_decoder(device, channels)
        self._warned = False
        blank = BytesIO()
        Image.new("RGB", (16, 16)).save(blank, "JPEG")
        try:
            self._decode([torch.frombuffer(bytearray(blank.getvalue()), dtype=torch.uint8)])
        except RuntimeError as error:
            raise ConfigError(
                f"--decode gpu: JPEG cannot be decoded on {device} ({first_line(error)}); "
                f"pip install 'lockstep-torch[gpu-decode]', or omit --decode gpu"
            ) from None

    def __call__(self, request: BatchRequest, raw: RawImages) -> RawImages:
        batch = raw.images
        assert isinstance(batch, Encoded)
        width, height = batch.size
        images = torch.zeros(len(raw.labels), self._channels, height, width, dtype=torch.uint8, device=self._device)
        made, corrupt = dict(batch.made), dict(raw.corrupt)
        for position, image in self._decode_all(batch).items():
            part = batch.wanted[position]
            if image is None:
                try:
                    made[position] = self._by_cpu(int(request.samples[position]), part, batch.size)
                except CorruptImageError as error:
                    corrupt[position] = (self._split.name(int(request.samples[position])), str(error))
                continue
            left, top, right, bottom = map(round, part.box)
            cut = image[:, top:bottom, left:right].unsqueeze(0).float()
            resized = resize(cut, height, width)[0]
            images[position] = (resized.flip(2) if part.flipped else resized).round_().clamp_(0, 255)
        for position, pixels in made.items():
            images[position] = torch.from_numpy(pixels).permute(2, 0, 1).to(self._device)
        return RawImages(images, raw.labels, corrupt)

    def _decode_all(self, batch: Encoded) -> dict[int, torch.Tensor | None]:
        """Return the images by position in the batch; None for those that the device rejects."""
        files = {position: batch.files[part.start : part.end] for position, part in batch.wanted.items()}
        if not files:
            return {}
        if self._device.type != "cpu":
            # nvJPEG writes on a stream of its own, which does not wait for work here that may still read memory that
            # has been freed and is given to the new images. The host waits for decoding anyway.
            accelerator.current_stream(self._device).synchronize()
        try:
            return dict(zip(files, self._decode(list(files.values())), strict=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return {position: self._decode_one(file) for position, file in files.items()}

    def _decode_one(self, file: torch.Tensor) -> torch.Tensor | None:
        try:
            return self._decode([file])[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._warned:
                logging.getLogger("lockstep").warning(
                    f"--decode gpu: the GPU cannot decode an image ({first_line(error)}); the CPU decodes such images"
                )
            self._warned = True
            return None

    def _by_cpu(self, sample: int, part: Wanted, size: Size) -> Pixels:
        pixels = decode(self._split.image(sample), self._channels, lambda width, height: part.box, size)
        return pixels[:, ::-1].copy() if part.flipped else pixels.copy()


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize images [N, C, H, W] to [N, C, height, width] with antialiasing.

    CUDA's kernel has not enough memory to shrink by more than about 92, so the means of blocks of pixels come first.
    """
    by = [-(-side // (MAX_SHRINK * new)) for side, new in zip(images.shape[2:], (height, width), strict=True)]
    if max(by) > 1:
        images = F.avg_pool2d(images, by)
    return F.interpolate(images, (height, width), mode="bilinear", antialias=True)
