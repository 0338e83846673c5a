"""Resize and re-encode images before packing."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image

from lockstep.data.pipeline.decode import GRAY_MODES, check_scans, eight_bits, fault_of, open_encoded
from lockstep.errors import ConfigError, CorruptImageError, DataError, first_line, require

# Pillow's format names, and the extensions that WebDataset's readers know.
FORMS = {"jpeg": "jpg", "png": "png", "webp": "webp"}
DEFAULT_QUALITY = 90


@dataclass(frozen=True)
class Encoding:
    """How images are re-encoded. By default, files are stored unchanged.

    Images whose short side exceeds `short_side` are resized to it and encoded as `form` (default jpeg). If `form` is
    set, images of any other format are re-encoded, too.
    """

    short_side: int | None = None
    form: str | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        require(self.short_side is None or self.short_side >= 1, "--short-side", self.short_side, "at least 1")
        require(self.quality is None or 1 <= self.quality <= 100, "--quality", self.quality, "between 1 and 100")
        if self.quality is not None and (not self.changes or self.form == "png"):
            raise ConfigError(
                f"--quality {self.quality}: only applies to lossy re-encoding; add --short-side or --format jpeg"
            )

    @property
    def changes(self) -> bool:
        return self.short_side is not None or self.form is not None

    def apply(self, content: bytes, path: Path) -> tuple[bytes, str]:
        """Return the bytes to store for the image file `path`, and their extension.

        As in training, EXIF rotation is not applied. Transparency is dropped; gray images stay gray.

        Raises:
            CorruptImageError: The image cannot be decoded for re-encoding.
            DataError: The image cannot be stored in this format.
        """
        if not self.changes:
            return content, _extension(path)
        try:
            check_scans(content)
            with open_encoded(content) as image:
                size, form = self._reduced(image.size), (image.format or "").lower()
                if size == image.size and self.form in (None, form):
                    return content, FORMS.get(form) or _extension(path)
                pixels = _decode(image, size)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise many types on damaged files
            raise CorruptImageError(
                f"{path} {fault_of(error)}; fix or remove it; `lockstep data pack --skip-corrupt` skips such files"
            ) from None
        return self._store(pixels, path)

    def _reduced(self, size: tuple[int, int]) -> tuple[int, int]:
        short = min(size)
        if self.short_side is None or short <= self.short_side:
            return size
        width, height = (max(1, round(side * self.short_side / short)) for side in size)
        return width, height

    def _store(self, pixels: Image.Image, path: Path) -> tuple[bytes, str]:
        form, stored = self.form or "jpeg", BytesIO()
        quality = {} if form == "png" else {"quality": self.quality or DEFAULT_QUALITY}
        try:
            pixels.save(stored, form, **quality)  # for JPEG, Pillow's chroma subsampling is 4:2:0
        except MemoryError:
            raise
        except Exception as error:  # such as more pixels than the format supports
            other = "png" if form == "jpeg" else "jpeg"
            raise DataError(
                f"{path} cannot be stored as {form} ({first_line(error)}); use --format {other}, or set --short-side"
            ) from None
        return stored.getvalue(), FORMS[form]


def _decode(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Decode to gray or RGB, as in training, resized to `size`."""
    image.draft(None, (2 * size[0], 2 * size[1]))  # JPEG: decode at 1/2, 1/4 or 1/8, never below twice the size
    pixels = eight_bits(image)
    pixels = pixels.convert("L" if pixels.mode in GRAY_MODES else "RGB")
    return pixels if pixels.size == size else pixels.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def _extension(path: Path) -> str:
    extension = path.suffix[1:].lower()
    return "jpg" if extension == "jpeg" else extension
