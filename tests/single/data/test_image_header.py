"""Headers, and pixels of 8 bits: training and packing see the same."""

from __future__ import annotations

import io
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from lockstep.data.decode import ImageHeader, decode, header
from lockstep.data.pack_writer import Encoding
from lockstep.data.sets import FileSplit
from lockstep.data.sources.image_folder import describe_range
from lockstep.errors import CorruptImageError


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [("L", 9, 9), ("LA", (9, 1), 9), ("I;16", 40000, 156), ("I;16B", 40000, 156), ("I", 40000, 156), ("1", 1, 255)],
)
def test_gray_of_every_depth_is_equal_in_training_and_in_a_pack(
    tmp_path: Path, mode: str, value: int, expected: int
) -> None:
    path = tmp_path / "x.tiff"
    Image.new(mode, (40, 40), value).save(path)
    for channels in (1, 3):
        assert np.all(decode(path, channels) == expected)
    stored, extension = Encoding(short_side=20).apply(path.read_bytes(), path)
    image = Image.open(io.BytesIO(stored))
    assert (image.mode, image.size, extension) == ("L", (20, 20), "jpg")
    assert np.all(np.asarray(image) == expected)
    look = header(FileSplit([path], [0]), 0)
    assert (look.form, look.size, look.gray) == ("TIFF", (40, 40), True)


@pytest.mark.parametrize(
    ("mode", "levels", "expected"),
    [
        ("I;16", (40, 209), ["values up to 209, .* nearly black"]),
        ("I;16", (40, 4000), ["values up to 4,000, .* dark, with few levels, .* 0 to 4,095, .* with --bits 12$"]),
        ("I;16", (40, 40000), []),
        ("I", (40, 255), ["nearly black"]),
        ("I", (40, 70000), ["values up to 70,000, .* clipped"]),
        ("L", (40, 209), []),
    ],
)
def test_unused_upper_bits_are_named(tmp_path: Path, mode: str, levels: tuple[int, int], expected: list[str]) -> None:
    paths = [tmp_path / "missing.tiff", *(tmp_path / f"{level}.tiff" for level in levels)]
    for path, level in zip(paths[1:], levels, strict=True):
        Image.new(mode, (40, 40), level).save(path)
    (tmp_path / "damaged.tiff").write_bytes(b"II*")
    notes = describe_range(FileSplit([*paths, tmp_path / "damaged.tiff"], [0, 1, 2, 3]))
    assert len(notes) == len(expected)
    assert all(map(re.search, expected, notes))
    assert not describe_range(FileSplit(paths, [0, 1, 2]), bits=12)


@pytest.mark.parametrize(
    ("mode", "value", "bits", "expected"),
    [
        ("I;16", 4095, 12, 255),
        ("I;16", 2000, 12, 125),
        ("I;16B", 2000, 12, 125),
        ("I;16", 40000, 16, 156),
        ("I", 70000, 17, 136),
        ("I", (1 << 31) - 1, 31, 255),
        ("I;16", 200, 8, 200),
        ("I;16", 2, 2, 170),
        ("I;16", 1, 1, 255),
        ("L", 200, 12, 200),
    ],
)
def test_bits_set_the_range_of_deep_gray(tmp_path: Path, mode: str, value: int, bits: int, expected: int) -> None:
    path = tmp_path / "x.tiff"
    Image.new(mode, (40, 40), value).save(path)
    for channels in (1, 3):
        assert np.all(decode(path, channels, bits=bits) == expected)
    stored, _ = Encoding(short_side=20, bits=bits).apply(path.read_bytes(), path)
    assert np.all(np.asarray(Image.open(io.BytesIO(stored))) == expected)


@pytest.mark.parametrize(("mode", "value"), [("I;16", 4096), ("I", -1)])
def test_values_outside_the_range_of_bits_are_refused(tmp_path: Path, mode: str, value: int) -> None:
    path = tmp_path / "x.tiff"
    Image.new(mode, (40, 40), value).save(path)
    with pytest.raises(CorruptImageError, match=f"{value:,} to {value:,}, exceed --bits 12, 0 to 4,095"):
        decode(path, 1, bits=12)


LONG = bytes(3 << 20)


@pytest.mark.parametrize(
    ("kind", "content", "after"),
    [
        (b"zTXt", b"Comment\0\0" + zlib.compress(LONG), False),
        (b"zTXt", b"Comment\0\0" + zlib.compress(LONG), True),
        (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LONG), False),
        (b"iCCP", LONG, False),
        (b"tEXt", b"Comment\0" + b"x" * (PngImagePlugin.MAX_TEXT_MEMORY + 1), False),
    ],
    ids=["text", "text after the pixels", "international", "color profile", "plain text"],
)
def test_long_metadata_of_a_png_does_not_make_it_damaged(
    tmp_path: Path, kind: bytes, content: bytes, after: bool
) -> None:
    chunks, path = PngImagePlugin.PngInfo(), tmp_path / "x.png"
    is_profile = kind == b"iCCP"
    if not is_profile:
        chunks.add(kind, content, after)
    image = Image.fromarray(np.arange(1200, dtype=np.uint8).reshape(20, 20, 3))
    image.save(path, pnginfo=chunks, icc_profile=content if is_profile else None)
    assert np.array_equal(decode(path, 3), np.asarray(image))
    assert header(FileSplit([path], [0]), 0) == ImageHeader("PNG", (20, 20), False)
    stored, _ = Encoding(short_side=10).apply(path.read_bytes(), path)
    assert Image.open(io.BytesIO(stored)).size == (10, 10)


@pytest.mark.parametrize("cut", [9, 20, 60, 200])
def test_a_truncated_png_is_damaged_still(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(20, 20, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptImageError):
        decode(path, 3)


def test_floating_pixels_are_refused_for_they_have_no_range(tmp_path: Path) -> None:
    path = tmp_path / "x.tiff"
    Image.new("F", (40, 40), 0.5).save(path)
    for read in (lambda: decode(path, 3), lambda: Encoding(short_side=20).apply(path.read_bytes(), path)):
        with pytest.raises(CorruptImageError, match="floating-point pixels"):
            read()
