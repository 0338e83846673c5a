"""Images as Pillow opens them: what the header alone tells, and pixels of 8 bits. Without torch.

A file may be anyone's. Pillow refuses more than 2 * MAX_IMAGE_PIXELS (179 million) of them before it decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from lockstep.data.sets import EncodedSplit
from lockstep.errors import LockstepError, first_line

GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B")


# What files of the extensions that are listed hold, and GIF. Pillow knows others that have no place in a data set, and
# runs another program, Ghostscript, on one of them (EPS), whatever the file's name is.
FORMS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
MOST_SCANS = 100  # of a JPEG; usual ones have up to 12, and each takes the time of a whole decoding


def open_image(file: BinaryIO) -> Image.Image:
    """An image whose header alone has been read; Pillow's errors, of many types, are raised as they are."""
    return Image.open(file, formats=FORMS)


def fault_of(error: Exception) -> str:
    """What reading or decoding an image raised, to follow its name in a message."""
    if isinstance(error, UnidentifiedImageError):  # its own text is an address in memory
        return f"cannot be decoded (it is not {', '.join(FORMS[:-1])} or {FORMS[-1]})"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    return f"cannot be decoded ({type(error).__name__}: {first_line(error)})"


def open_encoded(encoded: bytes | memoryview) -> Image.Image:
    """The same of bytes in memory, which `check_scans` has passed."""
    return open_image(BytesIO(encoded))


def check_scans(encoded: bytes | memoryview) -> None:
    """Refuse a JPEG that a small file makes decoders work on for minutes; other images pass.

    Raises:
        ValueError: It has more scans than any camera or program writes.
    """
    if bytes(encoded[:2]) != b"\xff\xd8" or not _may_have_many_scans(encoded):
        return
    if bytes(encoded).count(b"\xff\xda") > MOST_SCANS:
        raise ValueError(f"it is a JPEG with more than {MOST_SCANS} scans")


def _may_have_many_scans(jpeg: bytes | memoryview) -> bool:
    """Whether a JPEG's header does not show it to have one scan alone, as most have: counting takes time.

    Decoders pass over bytes that fill up and markers without a length; here they end the look, for few files have them.
    """
    place, components = 2, -1
    while place + 9 < len(jpeg) and jpeg[place] == 0xFF:
        marker = jpeg[place + 1]
        if marker == 0xDA:
            return jpeg[place + 4] != components
        if marker in (0xC0, 0xC1):  # sequential
            components = jpeg[place + 9]
        length = int.from_bytes(jpeg[place + 2 : place + 4])
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD9 or length < 2:
            return True
        place += 2 + length
    return True


@dataclass(frozen=True)
class Header:
    """What an image's header tells."""

    form: str
    size: tuple[int, int]
    grey: bool


def header(split: EncodedSplit, sample: int) -> Header | None:
    """An image's header; None: it cannot be read."""
    try:
        with split.open(sample) as file, open_image(file) as image:
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
        raise ValueError("floating-point pixels have no known range; store them with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip, not scale
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # Pillow would warn of what it cannot keep
        return image.convert("RGBA")
    return image
