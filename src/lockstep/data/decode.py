"""One image file to pixels, with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from lockstep.data.sets import InputSpec
from lockstep.errors import CorruptImageError

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]


def open_image(path: Path, channels: int) -> Image.Image:
    """Decode a file completely, as grey (1 channel) or RGB (3); any EXIF rotation is not applied.

    Raises:
        CorruptImageError: The file is missing, truncated, no image, or far too large; the message names it.
    """
    try:
        with Image.open(path) as image:
            return image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        raise CorruptImageError(
            f"{path} cannot be decoded ({type(error).__name__}: {error}); mend or remove it; "
            f"`lockstep train --skip-corrupt` goes on without such files"
        ) from None


def to_pixels(image: Image.Image, box: Box | None = None, size: tuple[int, int] | None = None) -> Pixels:
    """The image, or the part in `box` (left, top, right, bottom) resized to `size` (width, height): uint8 [H, W, C]."""
    if size is not None and not (box is None and size == image.size):
        image = image.resize(size, Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def evaluation_pixels(image: Image.Image, spec: InputSpec) -> Pixels:
    """The centre of an image as a model is to see it: uint8 [spec.height, spec.width, C].

    The box is as large as `spec.crop_ratio` allows with the input's aspect ratio, as if the image were resized by its
    short side and the centre cut out.
    """
    scale = spec.crop_ratio * min(image.width / spec.width, image.height / spec.height)
    half_width, half_height = spec.width * scale / 2, spec.height * scale / 2
    x, y = image.width / 2, image.height / 2
    box = (x - half_width, y - half_height, x + half_width, y + half_height)
    if image.size == (spec.width, spec.height) and spec.crop_ratio == 1.0:
        return to_pixels(image)
    return to_pixels(image, box, (spec.width, spec.height))
