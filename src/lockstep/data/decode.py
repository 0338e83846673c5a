"""One image file to pixels, with Pillow."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from lockstep.data.sets import InputSpec
from lockstep.errors import CorruptImageError

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]


GREY_MODES = ("1", "L", "I;16")


def open_image(name: str | Path, channels: int, read: Callable[[], bytes | memoryview] | None = None) -> Image.Image:
    """Decode an image completely, as grey (1 channel) or RGB (3); without `read`, the file `name`.

    Any EXIF rotation is not applied; of 16-bit grey the upper 8 bits are kept; transparency is ignored.

    Raises:
        CorruptImageError: The file is missing, truncated, no image, or far too large; the message names it.
    """
    try:
        with Image.open(BytesIO(read()) if read else name) as image:
            return _to_eight_bits(image).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        raise CorruptImageError(
            f"{name} cannot be decoded ({type(error).__name__}: {error}); mend or remove it; "
            f"`lockstep train --skip-corrupt` goes on without such files"
        ) from None


def _to_eight_bits(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip, not scale
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # Pillow would warn of what it cannot keep
        return image.convert("RGBA")
    return image


def to_pixels(image: Image.Image, box: Box | None = None, size: tuple[int, int] | None = None) -> Pixels:
    """The image, or the part in `box` (left, top, right, bottom) resized to `size` (width, height): uint8 [H, W, C]."""
    if size is not None:
        image = image.resize(size, Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def evaluation_pixels(image: Image.Image, spec: InputSpec) -> Pixels:
    """The centre of an image as a model is to see it: uint8 [spec.height, spec.width, C].

    The box is as large as `spec.crop_ratio` allows with the input's aspect ratio, as if the image were resized by its
    short side and the centre cut out.
    """
    if image.size == (spec.width, spec.height) and spec.crop_ratio == 1.0:
        return to_pixels(image)
    scale = spec.crop_ratio * min(image.width / spec.width, image.height / spec.height)
    x, y = image.width / 2, image.height / 2
    half_width, half_height = min(x, spec.width * scale / 2), min(y, spec.height * scale / 2)  # rounding may exceed
    box = (x - half_width, y - half_height, x + half_width, y + half_height)
    return to_pixels(image, box, (spec.width, spec.height))
