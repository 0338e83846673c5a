"""Decode an image: JPEG with simplejpeg (libjpeg-turbo) if installed, everything else with Pillow.

Pillow also decodes what simplejpeg rejects, so which images count as damaged does not depend on the decoder.
`benchmarks/jpeg_decoders.py` compares the decoders. Without torch.

Files are untrusted. Pillow rejects images of more than 2 * MAX_IMAGE_PIXELS (179 million) pixels before decoding.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from lockstep.data.sets import EncodedSplit, ImageFile, InputSpec
from lockstep.errors import CorruptImageError, DataError, LockstepError, first_line
from lockstep.files.untrusted import printable_name

GRAY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B")


# Formats of the listed extensions, and GIF. Pillow's other formats do not occur in data sets. For EPS, whatever the
# file's extension, Pillow would run an external program, Ghostscript.
FORMS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that leave the pixels as they are. Pillow decompresses them, and refuses an image with more than 1 MiB in one.
METADATA_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
MAX_SCANS = 100  # of a JPEG; most have up to 12, and each takes as long as decoding the whole image


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
        ValueError: The image has more than `MAX_SCANS` scans.
    """
    if bytes(encoded[:2]) != b"\xff\xd8" or not may_have_many_scans(encoded):
        return
    if bytes(encoded).count(b"\xff\xda") > MAX_SCANS:
        raise ValueError(f"it is a JPEG with more than {MAX_SCANS} scans")


def may_have_many_scans(jpeg: bytes | memoryview) -> bool:
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
class ImageHeader:
    """Facts from an image's header."""

    form: str
    size: tuple[int, int]
    gray: bool


def header(split: EncodedSplit, sample: int) -> ImageHeader | None:
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


def _header_of(image: Image.Image) -> ImageHeader:
    return ImageHeader(image.format or "?", image.size, image.mode in GRAY_MODES)


def eight_bits(image: Image.Image, bits: int | None = None) -> Image.Image:
    """Convert to a mode that Pillow converts faithfully to "L" and "RGB": 16-bit gray is reduced to its upper 8 bits.

    Raises:
        ValueError: The pixels are floating-point, with unknown range, or outside the range of `bits` (see `InputSpec`).
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; store them with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):  # Pillow would clip, not scale
        values = np.asarray(image)
        if bits is not None and not 0 <= values.min() <= values.max() < 1 << bits:
            raise ValueError(
                f"its values, {values.min():,} to {values.max():,}, exceed --bits {bits}, 0 to {(1 << bits) - 1:,}"
            )
        depth = bits or 16
        values = values >> depth - 8 if depth >= 8 else values * 255 // ((1 << depth) - 1)
        return Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:  # avoids a warning of Pillow about transparency
        return image.convert("RGBA")
    return image


def largest_value(encoded: bytes | memoryview) -> int | None:
    """Return the largest pixel of a gray image of more than 8 bits; None for others and unreadable ones."""
    try:
        with open_encoded(encoded) as image:
            deep = image.mode == "I" or image.mode.startswith("I;16")
            return int(np.asarray(image).max()) if deep else None
    except Exception:  # Pillow raises many types on damaged files
        return None


try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

Encoded = bytes | memoryview
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


def decode(
    file: ImageFile, channels: int, cut: Cut | None = None, size: Size | None = None, bits: int | None = None
) -> Pixels:
    """Decode an image, or the part that `cut` selects, to uint8 [H, W, channels]: gray (1) or RGB (3).

    It is resized to `size` bilinearly with antialiasing. EXIF rotation is not applied, gray of more than 8 bits is
    reduced to the upper 8 of `bits`, transparency is ignored, and CMYK becomes RGB by Pillow, without color profiles.

    Raises:
        CorruptImageError: The file is missing, truncated, not an image, or far too large; the message names it.
        DataError: The image's split cannot be read, or the machine is at fault (one of MACHINE_FAULTS, or no memory).
    """
    try:
        return decode_bytes(file.read_bytes(), channels, cut, size, bits)
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
    encoded: Encoded, channels: int, cut: Cut | None = None, size: Size | None = None, bits: int | None = None
) -> Pixels:
    """Like `decode`, but raise the decoder's own exceptions, which have many types."""
    check_scans(encoded)
    pixels = _by_simplejpeg(encoded, channels, cut, size)
    return _by_pillow(encoded, channels, cut, size, bits) if pixels is None else pixels


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
    """Return the evaluation input of an image, uint8 [spec.height, spec.width, spec.channels]; raise as `decode` does.

    Evaluation during training, `lockstep eval` and `lockstep predict` all use this function. Without `resize`, an image
    of another size raises OtherSizeError.
    """
    cut = partial(center if resize else _whole, spec)
    return decode(file, spec.channels, cut, (spec.width, spec.height), spec.bits)


def _whole(spec: InputSpec, width: int, height: int) -> Box:
    if (width, height) != (spec.width, spec.height):
        raise OtherSizeError(f"{width} x {height}")
    return 0.0, 0.0, float(width), float(height)


def _by_simplejpeg(encoded: Encoded, channels: int, cut: Cut | None, size: Size | None) -> Pixels | None:
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


def _by_pillow(encoded: Encoded, channels: int, cut: Cut | None, size: Size | None, bits: int | None) -> Pixels:
    with open_encoded(encoded) as image:
        width, height = image.size
        box, factor = _plan(width, height, cut, size)
        if factor > 1 and image.draft(None, (width // factor, height // factor)) is None:
            factor = 1  # only JPEG can be reduced
        pixels = np.array(eight_bits(image, bits).convert("L" if channels == 1 else "RGB"))
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
