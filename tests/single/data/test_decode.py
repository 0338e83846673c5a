"""Image files to pixels."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from lockstep.data import decode as decoding
from lockstep.data.decode import decode, evaluation_pixels, may_have_many_scans
from lockstep.data.sets import InputSpec
from lockstep.errors import CorruptImageError, DataError

WIDTH, HEIGHT = 24, 16


def _ramp(width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.float64]:
    """A smooth picture, 0 to 1, darkest at the top left: [H, W]."""
    y, x = np.mgrid[0:height, 0:width]
    return (x / (width - 1) + y / (height - 1)) / 2


def _colours(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    ramp = _ramp(width, height)
    waves = np.stack([ramp, 1 - ramp, 0.5 + 0.5 * np.sin(9 * ramp)], 2)
    return Image.fromarray(np.round(255 * waves).astype(np.uint8))


def _spec(height: int, width: int, crop_ratio: float = 1.0, channels: int = 3) -> InputSpec:
    return InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels, crop_ratio)


def _write(path: Path, kind: str) -> None:
    grey = Image.fromarray(np.round(255 * _ramp()).astype(np.uint8))
    if kind == "16-bit":
        Image.fromarray(np.round(65535 * _ramp()).astype(np.uint16)).save(path)
    elif kind == "palette with transparency":
        grey.convert("P").save(path, transparency=bytes(range(256)))
    else:
        grey.convert(kind).save(path)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["L", "LA", "RGB", "RGBA", "P", "palette with transparency", "16-bit"])
def test_every_kind_of_png_keeps_its_picture(tmp_path: Path, kind: str, channels: int) -> None:
    path = tmp_path / "ramp.png"
    _write(path, kind)
    pixels = decode(path, channels)
    assert pixels.shape == (HEIGHT, WIDTH, channels)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels - 255 * _ramp()[:, :, None]).max() <= 1


def test_color_becomes_gray_by_its_luminance(tmp_path: Path) -> None:
    Image.new("RGB", (4, 3), (255, 0, 0)).save(tmp_path / "red.png")
    assert set(decode(tmp_path / "red.png", 1).flatten().tolist()) == {76}  # 0.299 of 255


class _Drawn(NamedTuple):
    """An image file in memory."""

    content: bytes

    def read_bytes(self) -> bytes:
        return self.content

    def __str__(self) -> str:
        return "drawn"


def _as_png(image: Image.Image) -> _Drawn:
    return _Drawn(_encoded(image, "PNG"))


def _as_jpeg(image: Image.Image) -> _Drawn:
    return _Drawn(_encoded(image, "JPEG"))


def _encoded(image: Image.Image, form: str) -> bytes:
    file = BytesIO()
    image.save(file, form)
    return file.getvalue()


def _truncated(path: Path, form: str) -> None:
    _colours(200, 150).save(path, form)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _far_too_large(path: Path) -> None:
    """A few bytes that claim to be 30,000 x 30,000 pixels."""
    _colours().save(path, "PNG")
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 30_000, 30_000)  # in the header chunk, whose checksum comes after it
    content[29:33] = struct.pack(">I", crc32(content[12:29]))
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: _truncated(path, "JPEG"),
        lambda path: _truncated(path, "PNG"),
        _far_too_large,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("this is no image\n" * 100),
        lambda path: path.mkdir(),
        lambda path: None,
    ],
    ids=["truncated JPEG", "truncated PNG", "far too large", "empty", "text", "a folder", "missing"],
)
def test_what_cannot_be_decoded_is_named(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    path = tmp_path / "spoiled.jpg"
    spoil(path)
    with pytest.raises(CorruptImageError, match=rf"^{path} cannot be (decoded|read) \([^\n]*\)$"):
        decode(path, 3)


class _Failing(NamedTuple):
    error: BaseException

    def read_bytes(self) -> bytes:
        raise self.error

    def __str__(self) -> str:
        return "seven.jpg"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"seven\.jpg cannot be read \(Too many open files\)"),
        (OSError(errno.EIO, "Input/output error"), r"seven\.jpg cannot be read \(Input/output error\)"),
        (MemoryError(), r"out of memory while decoding seven\.jpg; lower --workers"),
    ],
)
def test_a_fault_of_the_machine_does_not_make_an_image_corrupt(error: BaseException, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        decode(_Failing(error), 3)
    assert not isinstance(caught.value, CorruptImageError)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 300), (1200, 260), (100, 120)])
def test_evaluation_resizes_the_short_side_to_256_and_crops_224(width: int, height: int) -> None:
    image = _colours(width, height)
    ours = evaluation_pixels(_as_png(image), _spec(224, 224, 0.875))
    theirs = np.asarray(Compose([Resize(256, InterpolationMode.BILINEAR), CenterCrop(224)])(image))
    assert ours.shape == (224, 224, 3)
    difference = np.abs(ours.astype(float) - theirs)
    assert difference.mean() < 1  # of 255; torchvision rounds the resized sides and the crop's place to whole pixels
    assert difference.max() < 6


def test_evaluation_keeps_the_aspect_ratio_for_non_square_inputs() -> None:
    pixels = evaluation_pixels(_as_png(_colours(300, 100)), _spec(50, 100))
    expected = _colours(300, 100).crop((50, 0, 250, 100)).resize((100, 50), Image.Resampling.BILINEAR)
    assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 1


def test_an_image_of_the_right_size_is_taken_as_it_is() -> None:
    image = _colours()
    assert np.array_equal(evaluation_pixels(_as_png(image), _spec(HEIGHT, WIDTH)), np.asarray(image))


@pytest.mark.parametrize("side", [8, 28, 32, 224])
def test_images_of_any_size_can_be_evaluated(side: int) -> None:
    """The center's box must not leave the image, not even by a rounding error."""
    refused = []

    def blank(width: int, height: int) -> _Drawn:
        return _as_png(Image.new("L", (width, height)))

    for width in range(1, 130):
        for height in (width, 2 * width + 1):
            try:
                pixels = evaluation_pixels(blank(width, height), _spec(side, side, channels=1))
                assert pixels.shape == (side, side, 1)
            except CorruptImageError as error:
                refused.append((width, height, str(error)))
    assert refused == []


def test_a_box_is_cut_out_and_resized() -> None:
    image = _colours()
    read = _as_png(image)
    cut = decode(read, 3, lambda width, height: (4.0, 2.0, 14.0, 10.0), (10, 8))
    assert np.array_equal(cut, np.asarray(image)[2:10, 4:14])
    whole = decode(read, 3, None, (12, 8))
    expected = np.asarray(image.resize((12, 8), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(whole - expected).max() <= 1


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Pillow":
        monkeypatch.setattr(decoding, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_jpeg_gives_the_same_pixels_by_either_decoder(mode: str, channels: int) -> None:
    image = _colours(200, 120).convert(mode)
    ours = decode(_as_jpeg(image), channels)
    pillow = np.asarray(Image.open(BytesIO(_as_jpeg(image).content)).convert("L" if channels == 1 else "RGB"))
    assert np.array_equal(ours, pillow.reshape(ours.shape))
    expected = np.asarray(image.convert("RGB").convert("L" if channels == 1 else "RGB")).astype(int)
    assert np.abs(ours - expected.reshape(ours.shape)).mean() < 6  # JPEG is lossy


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("width", "height"), [(1000, 750), (3000, 1700), (1811, 2503)])
def test_a_large_jpeg_is_reduced_in_decoding_and_looks_the_same(width: int, height: int) -> None:
    read = _as_jpeg(_colours(width, height))
    ours = evaluation_pixels(read, _spec(64, 64, 0.875))
    whole = evaluation_pixels(_Drawn(_encoded(Image.fromarray(decode(read, 3)), "BMP")), _spec(64, 64, 0.875))
    assert not np.array_equal(ours, whole)  # it was reduced
    assert np.abs(ours.astype(int) - whole).mean() < 1  # of 255


def _scans(number: int) -> bytes:
    """A progressive JPEG with one of its scans written many times."""
    file = BytesIO()
    _colours(64, 64).save(file, "JPEG", progressive=True)
    parts = file.getvalue()[:-2].split(b"\xff\xda")
    return b"\xff\xda".join([*parts, *parts[-1:] * (number - len(parts) + 1)]) + b"\xff\xd9"


ONE_SCAN = b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00" + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"


def _disguised(jpeg: bytes) -> bytes:
    """A JPEG with a byte that fills up before a comment; who takes a length there lands within the comment."""
    landing = 4 + 0xFEFF
    return (jpeg[:2] + b"\xff\xff\xfe\xff\xff").ljust(landing, b" ") + ONE_SCAN.ljust(5 + 0xFFFF - landing) + jpeg[2:]


@pytest.mark.parametrize("marker", [0x00, 0x01, 0xD0, 0xD7, 0xD8, 0xD9, 0xFF])
def test_only_a_header_that_all_read_alike_shows_a_single_scan(marker: int) -> None:
    def header(marker: int, length: int) -> bytes:
        return b"\xff\xd8\xff" + bytes([marker]) + length.to_bytes(2) + b" " * (length - 2) + ONE_SCAN

    assert not may_have_many_scans(header(0xE0, 16))
    assert may_have_many_scans(header(marker, 16))
    assert may_have_many_scans(header(0xE0, 0))


def test_images_that_run_programs_or_take_minutes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(owned) (w) file closefile\n")
    with pytest.raises(CorruptImageError, match="it is not JPEG, PNG,"):
        decode(path, 3)
    path.write_bytes(_scans(60))
    assert decode(path, 3).shape == (64, 64, 3)
    for many in (_scans(101), _disguised(_scans(101))):
        path.write_bytes(many)
        with pytest.raises(CorruptImageError, match="more than 100 scans"):
            decode(path, 3)


def test_what_simplejpeg_refuses_is_for_pillow_to_judge() -> None:
    """A JPEG with rubbish after its end has all of its picture, so it is not damaged."""
    content = _as_jpeg(_colours(40, 30)).content
    pixels = decode(_Drawn(content + b"rubbish" * 100), 3)
    assert np.array_equal(pixels, decode(_Drawn(content), 3))
    broken = bytearray(content)
    broken[len(content) // 2 : len(content) // 2] = b"\xff\xd9"  # an early end of the image
    with pytest.raises(CorruptImageError, match="drawn cannot be decoded"):
        decode(_Drawn(bytes(broken[: len(content) // 2])), 3)
