"""JPEG decoding on the GPU: loader processes read files and draw crops, the device decodes (nvJPEG) and resizes.

For training images alone: evaluation's crops lie between pixels, and its pixels are to be the same on all machines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from lockstep.data.buffers import share
from lockstep.data.decode import Box, Cut, Pixels, Size, decode
from lockstep.data.sets import EncodedSplit, ImageFile
from lockstep.data.stream import FileSource, Raw, Request
from lockstep.errors import CorruptImageError, LockstepError

MODES = {"L": 1, "RGB": 3}  # of a JPEG file whose channels are those of its images: their number
TAIL = 1024  # bytes at the end of a file in which its last marker is looked for; cameras add some


Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # from files, uint8 [bytes], to images, uint8 [C, H, W]


def batch_decoder(device: torch.device, channels: int) -> Decode:
    """torchcodec's decoder for a device, or torchvision's, which gives way to it from 0.29 on."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, RuntimeError):  # it is not installed, or lacks a library
        from torchvision import io

        mode = io.ImageReadMode.RGB if channels == 3 else io.ImageReadMode.GRAY
        return cast(Decode, partial(io.decode_jpeg, mode=mode, device=device))
    return cast(Decode, partial(decode_jpeg, mode="RGB" if channels == 3 else "GRAY", device=device))


class Wanted(NamedTuple):
    """The part of an encoded image that is wanted: where its file begins and ends, and the crop."""

    start: int
    end: int
    box: Box
    flipped: bool


class Encoded(NamedTuple):
    """A batch of files, one after the other as uint8 [bytes]; what the device cannot decode is there as pixels."""

    files: torch.Tensor
    size: Size
    wanted: dict[int, Wanted]  # by position in the batch
    made: dict[int, Pixels]


class EncodedSource:
    """Reads the files of a batch, and decodes those that are not plain JPEG."""

    def __init__(self, split: EncodedSplit, channels: int, by_cpu: FileSource):
        self._split, self._channels, self._by_cpu = split, channels, by_cpu

    def __getitems__(self, request: Request) -> Raw:
        cuts, flipped, size = self._by_cpu.plan(request)
        files: list[bytes | memoryview] = []
        wanted, made, corrupt, end = {}, {}, {}, 0
        for position, sample in enumerate(request.samples.tolist()):
            image, cut = self._split.image(sample), cuts[position]
            try:
                file = self._plain_jpeg(image, cut)
                if file is None:
                    pixels = decode(image, self._channels, cut, size)
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
        return Raw(Encoded(share(joined), size, wanted, made), self._by_cpu.labels(request), corrupt)

    def _plain_jpeg(self, file: ImageFile, cut: Cut) -> tuple[bytes | memoryview, Box] | None:
        """A whole JPEG file of the right colours, and the box to cut out of it; None: it is for `decode`."""
        try:
            encoded = file.read_bytes()
            with Image.open(BytesIO(encoded)) as image:  # which reads the header alone
                plain = image.format == "JPEG" and MODES.get(image.mode) in (self._channels, 1)
                box = cut(*image.size)
        except LockstepError:
            raise
        except Exception:  # `decode` will say what is wrong
            return None
        return (encoded, box) if plain and b"\xff\xd9" in bytes(encoded[-TAIL:]) else None


class DeviceDecoder:
    """Makes images of an encoded batch, on a device; where that fails, the CPU decides on each image."""

    def __init__(self, device: torch.device, channels: int, by_cpu: FileSource):
        self._device, self._channels, self._by_cpu = device, channels, by_cpu
        self._decode = batch_decoder(device, channels)

    def __call__(self, request: Request, raw: Raw) -> Raw:
        batch = raw.images
        assert isinstance(batch, Encoded)
        width, height = batch.size
        images = torch.zeros(len(raw.labels), self._channels, height, width, dtype=torch.uint8, device=self._device)
        for position, pixels in batch.made.items():
            images[position] = torch.from_numpy(pixels).permute(2, 0, 1).to(self._device)
        files = [batch.files[part.start : part.end] for part in batch.wanted.values()]
        try:
            decoded = self._decode(files) if files else []
        except RuntimeError:
            return self._by_cpu.__getitems__(request)
        for (position, part), image in zip(batch.wanted.items(), decoded, strict=True):
            left, top, right, bottom = map(round, part.box)
            cut = image[:, top:bottom, left:right].unsqueeze(0).float()
            resized = F.interpolate(cut, (height, width), mode="bilinear", antialias=True)[0]
            images[position] = (resized.flip(2) if part.flipped else resized).round_().clamp_(0, 255)
        return raw._replace(images=images)
