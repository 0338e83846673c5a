"""One encoded image to pixels: JPEG by libjpeg-turbo, through simplejpeg where it is installed, all else by Pillow.

Pillow also has the last word on what simplejpeg refuses, so what counts as damaged does not depend on the decoder.
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
Cut = Callable[[int, int], Box]  # from an image's width and height to the part of it that is wanted

# Errors of reading that say nothing about the file: too many open ones, no memory, a failing disk or server.
MACHINE_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
REDUCTIONS = (8, 4, 2)  # by which a JPEG decoder scales at little cost
# A reduced image keeps this many times the pixels a side that are wanted, and resizing does the rest: so evaluation's
# pixels stay within 1 of 255 of those of the whole image, on average.
SPARE = 2.0


def decode(file: ImageFile, channels: int, cut: Cut | None = None, size: Size | None = None) -> Pixels:
    """Decode an image, or the part of it that `cut` chooses, resized to `size` bilinearly with antialiasing.

    Any EXIF rotation is not applied; of 16-bit grey the upper 8 bits are kept; transparency is ignored; CMYK becomes
    RGB as Pillow converts it, without colour profiles.

    Args:
        channels: 1 for grey, 3 for RGB.

    Returns:
        uint8 [H, W, channels]

    Raises:
        CorruptImageError: The file is missing, truncated, no image, or far too large; the message names it.
        DataError: The split that it belongs to cannot be read, or the machine is at fault.
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
    """The error of an image that --skip-corrupt would leave out, for commands with that flag."""
    return CorruptImageError(f"{message}; fix or remove it, or skip such files with --skip-corrupt")


def decode_bytes(
    encoded: bytes | memoryview, channels: int, cut: Cut | None = None, size: Size | None = None
) -> Pixels:
    """Decode as `decode` does; what the decoder raises is raised as it is, and has many types."""
    check_scans(encoded)
    pixels = _by_simplejpeg(encoded, channels, cut, size)
    return _by_pillow(encoded, channels, cut, size) if pixels is None else pixels


class OtherSizeError(DataError):
    """An image does not have the size of the model's input; the message is its size."""


def centre(spec: InputSpec, width: int, height: int) -> Box:
    """The centre of an image that a model is to see in evaluation.

    The box is as large as `spec.crop_ratio` allows with the input's aspect ratio, as if the image were resized by its
    short side and the centre cut out.
    """
    scale = spec.crop_ratio * min(width / spec.width, height / spec.height)
    x, y = width / 2, height / 2
    half_width, half_height = min(x, spec.width * scale / 2), min(y, spec.height * scale / 2)  # rounding may exceed
    return x - half_width, y - half_height, x + half_width, y + half_height


def evaluation_pixels(file: ImageFile, spec: InputSpec, resize: bool = True) -> Pixels:
    """An image as a model is to see it in evaluation: uint8 [spec.height, spec.width, spec.channels].

    The only source of such pixels: a run's own evaluation, `lockstep eval` and `predict` all call this.

    Args:
        resize: False: refuse an image of another size than the input's.

    Raises:
        CorruptImageError: As `decode` does.
        OtherSizeError: The image has another size, and `resize` is off.
    """
    cut = partial(centre if resize else _whole, spec)
    return decode(file, spec.channels, cut, (spec.width, spec.height))


def _whole(spec: InputSpec, width: int, height: int) -> Box:
    if (width, height) != (spec.width, spec.height):
        raise OtherSizeError(f"{width} x {height}")
    return 0.0, 0.0, float(width), float(height)


def _by_simplejpeg(encoded: bytes | memoryview, channels: int, cut: Cut | None, size: Size | None) -> Pixels | None:
    """The pixels, or None where it is for Pillow to decode the image or to say what is wrong with it."""
    if simplejpeg is None or bytes(encoded[:2]) != b"\xff\xd8":
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        as_is = (colours, channels) in {("Gray", 1), ("Gray", 3), ("YCbCr", 3)}
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
    """The part that is wanted, and by how much the image may be reduced in decoding."""
    box = cut(width, height) if cut else (0.0, 0.0, float(width), float(height))
    if size is None:
        return box, 1
    shrink = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    return box, next((factor for factor in REDUCTIONS if shrink >= SPARE * factor), 1)


def _resize(pixels: Pixels, box: Box, factor: int, size: Size | None) -> Pixels:
    """The part `box` of an image, of which `pixels` are all, reduced by `factor`, in `size`."""
    height, width, channels = pixels.shape
    left, top = box[0] / factor, box[1] / factor
    right, bottom = min(box[2] / factor, width), min(box[3] / factor, height)
    if all(float(edge).is_integer() for edge in (left, top, right, bottom)):
        pixels = pixels[int(top) : int(bottom), int(left) : int(right)]
        if size is None or size == (pixels.shape[1], pixels.shape[0]):
            return pixels
        import torch  # here, for images that are only checked are not resized

        planes = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
        planes = torch.nn.functional.interpolate(planes, (size[1], size[0]), mode="bilinear", antialias=True)
        return planes[0].permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    resized = np.array(image.resize(size or image.size, Image.Resampling.BILINEAR, box=(left, top, right, bottom)))
    return resized.reshape(*resized.shape[:2], channels)
