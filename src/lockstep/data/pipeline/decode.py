"""Decode an image: JPEG with simplejpeg (libjpeg-turbo) if installed, everything else with Pillow.

Pillow also decodes what simplejpeg rejects, so which images count as damaged does not depend on the decoder.
`benchmarks/jpeg_decoders.py` compares the decoders.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
from PIL import Image

from lockstep.data.pipeline.image_header import check_scans, eight_bits, fault_of, open_encoded
from lockstep.data.sets import ImageFile, InputSpec
from lockstep.errors import CorruptImageError, DataError, LockstepError
from lockstep.files.untrusted import printable_name

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels
Size = tuple[int, int]  # width, height
Cut = Callable[[int, int], Box]  # (width, height) of an image -> the part to decode

# Read errors that are not faults of the file: too many open files, no memory, a failing disk or server.
MACHINE_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
REDUCTIONS = (8, 4, 2)  # scale factors that are cheap in a JPEG decoder
# A reduced image has at least this many times the target's side, and is then resized. On average, the pixels for
# evaluation therefore differ by less than 1 of 255 from those of the full image.
SPARE = 2.0


def decode(file: ImageFile, channels: int, cut: Cut | None = None, size: Size | None = None) -> Pixels:
    """Decode an image, or the part that `cut` selects, resized to `size` bilinearly with antialiasing.

    EXIF rotation is not applied, 16-bit gray is reduced to its upper 8 bits, transparency is ignored, and CMYK is
    converted to RGB by Pillow, without color profiles.

    Args:
        channels: 1 for gray, 3 for RGB.

    Returns:
        uint8 [H, W, channels]

    Raises:
        CorruptImageError: The file is missing, truncated, not an image, or far too large; the message names it.
        DataError: The image's split cannot be read, or the machine is at fault (one of MACHINE_FAULTS, or no memory).
    """
    try:
        return decode_bytes(file.read_bytes(), channels, cut, size)
    except LockstepError:
        raise
    except MemoryError:
        raise DataError(f"out of memory while decoding {file}; lower --workers or --batch-size") from None
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
            raise DataError(
                f"{file} cannot be read ({error.strerror}); the image may be intact: check this machine"
            ) from None
        raise CorruptImageError(f"{printable_name(str(file))} {fault_of(error)}") from None


def unless_skipped(message: str) -> CorruptImageError:
    """Return the error of a corrupt image, for commands with --skip-corrupt."""
    return CorruptImageError(f"{message}; fix or remove it, or skip such files with --skip-corrupt")


def decode_bytes(
    encoded: bytes | memoryview, channels: int, cut: Cut | None = None, size: Size | None = None
) -> Pixels:
    """Like `decode`, but raise the decoder's own exceptions, which have many types."""
    check_scans(encoded)
    pixels = _by_simplejpeg(encoded, channels, cut, size)
    return _by_pillow(encoded, channels, cut, size) if pixels is None else pixels


class OtherSizeError(DataError):
    """An image differs in size from the model's input; the message is its size."""


def center(spec: InputSpec, width: int, height: int) -> Box:
    """Return the center crop for evaluation.

    Equivalent to resizing the image by its short side, then cropping the center with the input's aspect ratio.
    """
    scale = spec.crop_ratio * min(width / spec.width, height / spec.height)
    x, y = width / 2, height / 2
    half_width, half_height = min(x, spec.width * scale / 2), min(y, spec.height * scale / 2)  # rounding may exceed
    return x - half_width, y - half_height, x + half_width, y + half_height


def evaluation_pixels(file: ImageFile, spec: InputSpec, resize: bool = True) -> Pixels:
    """Return the evaluation input of an image, uint8 [spec.height, spec.width, spec.channels].

    Evaluation during training, `lockstep eval` and `lockstep predict` all use this function.

    Args:
        resize: If False, reject images whose size differs from the input's.

    Raises:
        CorruptImageError: As `decode` does.
        OtherSizeError: The size differs, and `resize` is False.
    """
    cut = partial(center if resize else _whole, spec)
    return decode(file, spec.channels, cut, (spec.width, spec.height))


def _whole(spec: InputSpec, width: int, height: int) -> Box:
    if (width, height) != (spec.width, spec.height):
        raise OtherSizeError(f"{width} x {height}")
    return 0.0, 0.0, float(width), float(height)


def _by_simplejpeg(encoded: bytes | memoryview, channels: int, cut: Cut | None, size: Size | None) -> Pixels | None:
    """Decode with simplejpeg; None if Pillow must decode the image or report its fault."""
    if simplejpeg is None or bytes(encoded[:2]) != b"\xff\xd8":
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(encoded)
        as_is = (colors, channels) in {("Gray", 1), ("Gray", 3), ("YCbCr", 3)}
        if not as_is or width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        box, factor = _plan(width, height, cut, size)
        smallest = {"min_width": -(-width // factor), "min_height": -(-height // factor)}
        pixels = simplejpeg.decode_jpeg(encoded, "RGB" if channels == 3 else "GRAY", **smallest)
    except ValueError:
        return None
    return _resize(pixels, box, factor, size)


def _by_pillow(encoded: bytes | memoryview, channels: int, cut: Cut | None, size: Size | None) -> Pixels:
    with open_encoded(encoded) as image:
        width, height = image.size
        box, factor = _plan(width, height, cut, size)
        if factor > 1 and image.draft(None, (width // factor, height // factor)) is None:
            factor = 1  # only JPEG can be reduced
        pixels = np.array(eight_bits(image).convert("L" if channels == 1 else "RGB"))
    return _resize(pixels.reshape(*pixels.shape[:2], channels), box, factor, size)


def _plan(width: int, height: int, cut: Cut | None, size: Size | None) -> tuple[Box, int]:
    """Return the part to decode, and the factor by which decoding may reduce the image."""
    box = cut(width, height) if cut else (0.0, 0.0, float(width), float(height))
    if size is None:
        return box, 1
    shrink = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    return box, next((factor for factor in REDUCTIONS if shrink >= SPARE * factor), 1)


def _resize(pixels: Pixels, box: Box, factor: int, size: Size | None) -> Pixels:
    """Crop `box`, in full-size coordinates, from `pixels`, which are reduced by `factor`, and resize to `size`."""
    height, width, channels = pixels.shape
    left, top = box[0] / factor, box[1] / factor
    right, bottom = min(box[2] / factor, width), min(box[3] / factor, height)
    if all(float(edge).is_integer() for edge in (left, top, right, bottom)):
        pixels = pixels[int(top) : int(bottom), int(left) : int(right)]
        if size is None or size == (pixels.shape[1], pixels.shape[0]):
            return pixels
        import torch  # imported here: checking images needs no resizing

        planes = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
        planes = torch.nn.functional.interpolate(planes, (size[1], size[0]), mode="bilinear", antialias=True)
        return planes[0].permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    resized = np.array(image.resize(size or image.size, Image.Resampling.BILINEAR, box=(left, top, right, bottom)))
    return resized.reshape(*resized.shape[:2], channels)
