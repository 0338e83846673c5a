"""Making images smaller before they are packed: what is stored of an image's file."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.errors import ConfigError, CorruptImageError

# Pillow's names, and the extensions that WebDataset's readers know.
FORMS = {"jpeg": "jpg", "png": "png", "webp": "webp"}
DEFAULT_QUALITY = 90


@dataclass(frozen=True)
class Encoding:
    """What is done to images; by default nothing, and files are stored byte for byte.

    Images whose short side is above `short_side` are resized to it; these are written as `form` (default jpeg), and so
    is every image of another form if `form` is given.
    """

    short_side: int | None = None
    form: str | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.short_side is not None and self.short_side < 1:
            raise ConfigError(f"--short-side is a number of pixels, 1 or more; got {self.short_side}")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ConfigError(f"--quality is between 1 and 100; got {self.quality}")
        if self.quality is not None and (not self.changes or self.form == "png"):
            raise ConfigError(
                "--quality is for images that are re-encoded with loss: add --short-side or --format jpeg"
            )

    @property
    def changes(self) -> bool:
        return self.short_side is not None or self.form is not None

    def apply(self, content: bytes, path: Path) -> tuple[bytes, str]:
        """What to store of the image file `path`, and with which extension.

        Any EXIF rotation is not applied, as in training; transparency is dropped, grey stays grey.

        Raises:
            CorruptImageError: It had to be decoded and cannot be.
        """
        if not self.changes:
            return content, _extension(path)
        try:
            with Image.open(BytesIO(content)) as image:
                size = self._reduced(image.size)
                if size == image.size and self.form in (None, (image.format or "").lower()):
                    return content, _extension(path)
                return self._encode(image, size)
        except Exception as error:  # Pillow's decoders raise many types on damaged files
            raise CorruptImageError(
                f"{path} cannot be decoded ({type(error).__name__}: {error}); mend or remove it; "
                f"`lockstep data pack --skip-corrupt` leaves such files out"
            ) from None

    def _reduced(self, size: tuple[int, int]) -> tuple[int, int]:
        short = min(size)
        if self.short_side is None or short <= self.short_side:
            return size
        width, height = (max(1, round(side * self.short_side / short)) for side in size)
        return width, height

    def _encode(self, image: Image.Image, size: tuple[int, int]) -> tuple[bytes, str]:
        image.draft(None, (2 * size[0], 2 * size[1]))  # JPEG: decode at 1/2, 1/4 or 1/8, never below twice the size
        pixels = _eight_bits(image)
        if pixels.size != size:
            pixels = pixels.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        form, stored = self.form or "jpeg", BytesIO()
        quality = {} if form == "png" else {"quality": self.quality or DEFAULT_QUALITY}
        pixels.save(stored, form, **quality)  # of JPEG, Pillow's chroma subsampling is 4:2:0
        return stored.getvalue(), FORMS[form]


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey or RGB, as training sees it: of 16-bit grey the upper 8 bits."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _extension(path: Path) -> str:
    extension = path.suffix[1:].lower()
    return "jpg" if extension == "jpeg" else extension
