"""Image headers, and conversion to 8 bits, with Pillow. Without torch.

Files are untrusted. Pillow rejects images of more than 2 * MAX_IMAGE_PIXELS (179 million) pixels before decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from lockstep.data.sets import EncodedSplit
from lockstep.errors import LockstepError, first_line

GRAY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B")


# Formats of the listed extensions, and GIF. Pillow's other formats do not occur in data sets. For EPS, whatever the
# file's extension, Pillow would run an external program, Ghostscript.
FORMS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that leave the pixels as they are. Pillow decompresses them, and refuses an image with more than 1 MiB in one.
METADATA_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
MOST_SCANS = 100  # of a JPEG; most have up to 12, and each takes as long as decoding the whole image


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image, reading only its header. Raises Pillow's exceptions, which have many types."""
    return Image.open(file, formats=FORMS)


def fault_of(error: Exception) -> str:
    """Describe an error of reading or decoding, to follow an image's name in a message."""
    if isinstance(error, UnidentifiedImageError):  # its text is a memory address
        return f"cannot be decoded (it is not {', '.join(FORMS[:-1])} or {FORMS[-1]})"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    return f"cannot be decoded ({type(error).__name__}: {first_line(error)})"


def open_encoded(encoded: bytes | memoryview) -> Image.Image:
    """Open an image from bytes that passed `check_scans`, reading only its header."""
    return open_image(BytesIO(_without_metadata(encoded)))


def _without_metadata(encoded: bytes | memoryview) -> bytes | bytearray | memoryview:
    """Return a PNG without text and color profile; other images unchanged."""
    if bytes(encoded[: len(PNG_SIGNATURE)]) != PNG_SIGNATURE:
        return encoded
    kept, position = bytearray(PNG_SIGNATURE), len(PNG_SIGNATURE)
    while position < len(encoded):
        end = position + 12 + int.from_bytes(encoded[position : position + 4])
        if encoded[position + 4 : position + 8] not in METADATA_CHUNKS:
            kept += encoded[position:end]
        position = end
    return kept


def check_scans(encoded: bytes | memoryview) -> None:
    """Reject JPEG bombs: small files with so many scans that decoding takes minutes. Other images pass.

    Raises:
        ValueError: The image has more than `MOST_SCANS` scans.
    """
    if bytes(encoded[:2]) != b"\xff\xd8" or not _may_have_many_scans(encoded):
        return
    if bytes(encoded).count(b"\xff\xda") > MOST_SCANS:
        raise ValueError(f"it is a JPEG with more than {MOST_SCANS} scans")


def _may_have_many_scans(jpeg: bytes | memoryview) -> bool:
    """Return False if a JPEG's header shows that it has only one scan, as most do; counting scans is slower.

    Return True at once for fill bytes and markers without a length, which are rare.
    """
    position, components = 2, -1
    while position + 9 < len(jpeg) and jpeg[position] == 0xFF:
        marker = jpeg[position + 1]
        if marker == 0xDA:
            return jpeg[position + 4] != components
        if marker in (0xC0, 0xC1):  # sequential
            components = jpeg[position + 9]
        length = int.from_bytes(jpeg[position + 2 : position + 4])
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD9 or length < 2:
            return True
        position += 2 + length
    return True


@dataclass(frozen=True)
class Header:
    """Facts from an image's header."""

    form: str
    size: tuple[int, int]
    gray: bool


def header(split: EncodedSplit, sample: int) -> Header | None:
    """Return an image's header; None if it cannot be read."""
    try:
        try:
            with split.open(sample) as file, open_image(file) as image:
                return _header_of(image)
        except ValueError:  # possibly a PNG with too much metadata for Pillow
            with open_encoded(split.read(sample)) as image:
                return _header_of(image)
    except LockstepError:
        raise
    except Exception:  # Pillow raises many types on damaged files
        return None


def _header_of(image: Image.Image) -> Header:
    return Header(image.format or "?", image.size, image.mode in GRAY_MODES)


def eight_bits(image: Image.Image) -> Image.Image:
    """Convert to a mode that Pillow converts faithfully to "L" and "RGB": 16-bit gray is reduced to its upper 8 bits.

    Raises:
        ValueError: The pixels are floating-point, with unknown range.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; store them with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip, not scale
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # avoids a warning of Pillow about transparency
        return image.convert("RGBA")
    return image
