"""Images as Pillow opens them: what the header alone tells, and pixels of 8 bits. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from lockstep.data.sets import EncodedSplit
from lockstep.errors import LockstepError

GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B")


@dataclass(frozen=True)
class Header:
    """What an image's header tells."""

    form: str
    size: tuple[int, int]
    grey: bool


def header(split: EncodedSplit, sample: int) -> Header | None:
    """An image's header; None: it cannot be read."""
    try:
        with split.open(sample) as file, Image.open(file) as image:
            return Header(image.format or "?", image.size, image.mode in GREY_MODES)
    except LockstepError:
        raise
    except Exception:  # Pillow raises many types on damaged files
        return None


def eight_bits(image: Image.Image) -> Image.Image:
    """An image that converts to "L" and "RGB" as it looks: of 16-bit grey the upper 8 bits are kept.

    Raises:
        ValueError: Its pixels are floating, of no known range.
    """
    if image.mode == "F":
        raise ValueError("floating pixels have no range that is known; store them with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip, not scale
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # Pillow would warn of what it cannot keep
        return image.convert("RGBA")
    return image
