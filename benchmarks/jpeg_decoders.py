"""Which decoder turns a JPEG file into a training image fastest?

    pip install opencv-python-headless torchcodec       # optional; missing decoders are skipped
    python benchmarks/jpeg_decoders.py FOLDER           # any folder with JPEG files below it

Each decodes what a random crop needs and resizes it to 224 x 224, from files in memory, on one core with one thread.
The first contestant works like torchvision: RandomResizedCrop on Pillow's image. "large" has the same images enlarged
to about 12 megapixels, as from a camera; decoders that can downscale while decoding win there.

Not included: decoding only a region. libjpeg-turbo can do it, but no package with wheels exposes it (PyTurboJPEG's crop
rewrites the file and needs the system's libturbojpeg 3; simplejpeg 1.9, OpenCV 5 and torchcodec 0.17 decode whole
images). The coefficients above and to the left of the region must be read in any case.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from harness import Unit, Work, argument, compare, existing_folder, pin
from PIL import Image
from torchvision import io

from lockstep.data import decode as decoding
from lockstep.data.decode import Box
from lockstep.data.random_draws import Draws
from lockstep.data.transforms import RandomCrop

SIDE = 224
LARGE = 12  # how many images are enlarged
Make = Callable[[bytes, Callable[[int, int], Box]], object]


class InMemory(NamedTuple):
    """An image file."""

    content: bytes

    def read_bytes(self) -> bytes:
        return self.content


def resize(pixels: torch.Tensor, box: Box) -> torch.Tensor:
    """Crop the box from uint8 pixels [C, H, W] and resize it to 224 x 224."""
    left, top, right, bottom = map(int, box)
    part = pixels[:, top:bottom, left:right].unsqueeze(0)
    return F.interpolate(part, (SIDE, SIDE), mode="bilinear", antialias=True)


def pillow(encoded: bytes, cut: Callable[[int, int], Box]) -> object:
    with Image.open(BytesIO(encoded)) as image:
        rgb = image.convert("RGB")
    return np.asarray(rgb.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=cut(*rgb.size)))


def lockstep(decoder: Any, encoded: bytes, cut: Callable[[int, int], Box]) -> object:
    decoding.simplejpeg = decoder  # type: ignore[attr-defined]
    return decoding.decode(InMemory(encoded), 3, cut, (SIDE, SIDE))


def torchvision_io(encoded: bytes, cut: Callable[[int, int], Box]) -> object:
    source = torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())
    pixels = io.decode_jpeg(source, io.ImageReadMode.RGB)
    return resize(pixels, cut(pixels.shape[2], pixels.shape[1]))


def torchcodec(module: Any, encoded: bytes, cut: Callable[[int, int], Box]) -> object:
    pixels = module.decode_jpeg(encoded, mode="RGB")
    return resize(pixels, cut(pixels.shape[2], pixels.shape[1]))


def opencv(module: Any, encoded: bytes, cut: Callable[[int, int], Box]) -> object:
    pixels = module.imdecode(np.frombuffer(encoded, np.uint8), module.IMREAD_COLOR_RGB)
    left, top, right, bottom = map(int, cut(pixels.shape[1], pixels.shape[0]))
    return module.resize(pixels[top:bottom, left:right], (SIDE, SIDE), interpolation=module.INTER_AREA)


def contestants() -> dict[str, Make]:
    found: dict[str, Make] = {"Pillow": pillow, "Lockstep, Pillow": partial(lockstep, None)}
    found["torchvision.io"] = torchvision_io
    for name, module, make in (
        ("OpenCV", "cv2", opencv),
        ("torchcodec", "torchcodec.decoders", torchcodec),
        ("Lockstep, simplejpeg", "simplejpeg", lockstep),
    ):
        try:
            found[name] = partial(make, importlib.import_module(module))
        except (ImportError, RuntimeError) as error:
            print(f"skipping {name}: {error}")
    return found


def over_all(make: Make, files: list[bytes]) -> Work:
    crops = RandomCrop(Draws(0, 0, np.arange(len(files))), 0.08)

    def work() -> int:
        for position, encoded in enumerate(files):
            make(encoded, partial(crops.box, position))
        return len(files)

    return work


def enlarged(encoded: bytes) -> bytes:
    with Image.open(BytesIO(encoded)) as image:
        factor = (12e6 / (image.width * image.height)) ** 0.5
        large = image.convert("RGB").resize((round(factor * image.width), round(factor * image.height)))
    file = BytesIO()
    large.save(file, "JPEG", quality=90)
    return file.getvalue()


def main(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    files = [path.read_bytes() for path in paths]
    pin()
    for case, images in (("as they are", files), ("large", [enlarged(file) for file in files[:LARGE]])):
        works = {name: over_all(make, images) for name, make in contestants().items()}
        compare(f"jpeg_decoders: {case}", works, {}, Unit("images/s", per_second=True), rounds=9)


if __name__ == "__main__":
    main(argument("folder", existing_folder))
