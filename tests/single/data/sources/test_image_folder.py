"""Folders of images: their layout, their classes, and when they are held in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from lockstep.config.schema import DataConfig
from lockstep.data.sets import FileSplit, ImageData, MemorySplit
from lockstep.data.sources import image_folder
from lockstep.data.sources.image_folder import IMAGENET_MEAN, IMAGENET_STD, list_images
from lockstep.errors import ConfigError, CorruptImageError, DataError

NewFolder = Callable[..., Path]


def _load(path: Path, **settings: Any) -> ImageData:
    return image_folder.load(path, DataConfig(dataset=str(path), **settings))


def _memory(data: ImageData) -> tuple[MemorySplit, MemorySplit]:
    assert isinstance(data.train, MemorySplit)
    assert isinstance(data.val, MemorySplit)
    return data.train, data.val


def _files(data: ImageData) -> tuple[FileSplit, FileSplit]:
    assert isinstance(data.train, FileSplit)
    assert isinstance(data.val, FileSplit)
    return data.train, data.val


def _spoil(path: Path) -> str:
    """Cut an image file in half: its header can still be read."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return str(path)


def test_circular_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    for place in (tmp_path / split / name for split in ("train", "val") for name in ("a", "b")):
        (place / "inner").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(place / "inner" / "1.png")
        (place / "again").symlink_to("inner")
        (place / "up").symlink_to("../..")
        for back in ("x", "y"):
            (place / back).symlink_to(".")
            (place / "inner" / back).symlink_to("..")
    _, train, _ = list_images(tmp_path)
    found = [str(path.relative_to(tmp_path / "train")) for path in train.paths]
    assert found == ["a/again/1.png", "a/inner/1.png", "b/again/1.png", "b/inner/1.png"]
    os.mkfifo(tmp_path / "train" / "a" / "0.jpg")
    _, train, _ = list_images(tmp_path)
    assert train.paths[0].name == "0.jpg"
    with pytest.raises(ValueError, match="not a regular file"):
        train.open(0)


def test_links_to_links_without_end_are_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in range(40):
            place = tmp_path / split / "a" / str(number)
            place.mkdir(parents=True)
            for name in ("x", "y"):
                (place / name).symlink_to(f"../{number + 1}")
        (tmp_path / split / "a" / "40").mkdir()
    with pytest.raises(DataError, match="links to the same folder"):
        list_images(tmp_path)


def test_classes_and_files_match_torchvisions_image_folder(tmp_path: Path) -> None:
    image = Image.new("RGB", (100, 90))
    for name in ("b", "10", "9", "B", "ä", "b/deeper"):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            for file in ("2.jpg", "10.JPEG", "1.png"):
                image.save(tmp_path / split / name / file)
            (tmp_path / split / name / "notes.txt").write_text("no image")
    data = _load(tmp_path)
    for split, part in zip(_files(data), ("train", "val"), strict=True):
        theirs = ImageFolder(tmp_path / part)
        assert list(data.classes) == theirs.classes
        ours = zip(map(str, split.paths), split.labels, strict=True)
        assert list(ours) == theirs.samples


def test_names_that_start_with_a_dot_are_ignored(folder: Path) -> None:
    before = list_images(folder)
    shutil.copytree(folder / "train" / "blue", folder / "train" / ".ipynb_checkpoints")
    shutil.copytree(folder / "train" / "blue", folder / "train" / "blue" / ".ipynb_checkpoints")
    (folder / "train" / "red" / "._000.png").write_bytes(b"\0\5\x16\7")
    assert list_images(folder) == before


def test_files_that_are_no_images_are_counted(folder: Path) -> None:
    assert not _load(folder).notes
    for name in ("a.gif", "b.GIF", "notes"):
        (folder / "train" / "red" / name).touch()
    assert _load(folder).notes == ["ignored files without an image extension: 2 .gif, 1 without extension"]


def test_a_single_class_is_noted(folder: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(folder / split / "red")
    assert _load(folder).notes == ["there is only one class, so top-1 is always 100 %"]


@pytest.mark.parametrize("left", ["", "blue", "blue/inner"])
def test_class_without_validation_images_keeps_the_numbering(folder: Path, left: str) -> None:
    shutil.rmtree(folder / "val" / "blue")
    (folder / "val" / left).mkdir(parents=True, exist_ok=True)
    data = _load(folder)
    assert data.classes == ("blue", "red")
    assert _memory(data)[1].labels.tolist() == [1] * 5


@pytest.mark.parametrize("name", ["test", "valid", "validation"])
def test_the_validation_folder_may_have_another_usual_name(folder: Path, name: str) -> None:
    (folder / "val").rename(folder / name)
    assert len(_load(folder).val) == 10


def _without(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).rename(path / "elsewhere")


def _empty_class(path: Path) -> None:
    (path / "train" / "green").mkdir()


def _no_validation_images(path: Path) -> None:
    for image in path.glob("val/*/*.png"):
        image.unlink()


def _unknown_class(path: Path) -> None:
    (path / "val" / "red").rename(path / "val" / "orange")


def _empty(name: str) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        (path / name).rename(path / "elsewhere")
        (path / name).mkdir()

    return act


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without("train"), ["no train/", "found elsewhere/, val/"]),
        (_without("val"), ["val/", "test/", "found elsewhere/, train/"]),
        (_empty("train"), ["train"]),
        (_empty("val"), ["val"]),
        (_empty_class, ["green has no images"]),
        (_no_validation_images, ["val has no images"]),
        (_unknown_class, ["orange", "train"]),
    ],
    ids=["no train", "no val", "empty train", "empty val", "empty class", "no validation images", "unknown class"],
)
def test_a_wrong_layout_is_refused_by_name(folder: Path, spoil: Callable[[Path], object], words: list[str]) -> None:
    spoil(folder)
    with pytest.raises(DataError) as caught:
        _load(folder)
    assert str(folder) in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_small_images_of_one_size_are_held_in_memory(folder: Path) -> None:
    data = _load(folder)
    train, val = _memory(data)
    assert (train.images.shape, val.images.shape) == ((40, 3, 12, 16), (10, 3, 12, 16))
    assert train.labels.tolist() == [0] * 20 + [1] * 20
    assert (data.input.channels, data.input.height, data.input.width) == (3, 12, 16)
    theirs = ImageFolder(folder / "train")
    for ours, (image, _) in zip(train.images, theirs, strict=True):
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(image))


def test_mean_and_deviation_are_those_of_the_training_pixels(folder: Path) -> None:
    data = _load(folder)
    pixels = _memory(data)[0].images.numpy() / 255
    assert data.input.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-9)
    assert data.input.std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-9)


def test_constant_channel_can_be_normalized(new_folder: NewFolder) -> None:
    path = new_folder(train=1, val=1)
    for file in path.rglob("*.png"):
        Image.new("RGB", (8, 8), (0, 128, 255)).save(file)
    data = _load(path)
    assert data.input.mean == pytest.approx((0, 128 / 255, 1))
    assert min(data.input.std) > 0


def test_gray_images_have_one_channel(new_folder: NewFolder) -> None:
    path = new_folder(train=3, val=2)
    for number, file in enumerate(sorted(path.rglob("*.png"))):
        Image.new("L", (8, 8), number).save(file)
    data = _load(path)
    train, val = _memory(data)
    assert data.input.channels == 1
    assert [image.unique().tolist() for image in torch.cat([train.images, val.images])] == [[n] for n in range(10)]


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        (((65, 64),), {}),
        (((16, 12), (12, 16)), {}),
        (((16, 12),), {"in_memory": "never"}),
        (((16, 12),), {"image_size": 32}),
    ],
    ids=["large", "of two sizes", "never", "to be cropped"],
)
def test_other_images_are_read_when_they_are_needed(
    new_folder: NewFolder, sizes: tuple[tuple[int, int], ...], settings: dict[str, Any]
) -> None:
    path = new_folder(sizes=sizes, train=2, val=1)
    if len(sizes) > 1:  # the images looked at are the first of each class: make these two differ
        Image.new("RGB", sizes[1]).save(path / "train" / "red" / "000.png")
    data = _load(path, **settings)
    train, val = _files(data)
    side = settings.get("image_size", 224)
    assert (len(train), len(val)) == (4, 2)
    assert (data.input.height, data.input.width, data.input.crop_ratio) == (side, side, 0.875)
    assert (data.input.mean, data.input.std) == (IMAGENET_MEAN, IMAGENET_STD)


def test_images_of_different_sizes_cannot_be_held_as_they_are(new_folder: NewFolder) -> None:
    path = new_folder(sizes=((16, 12), (20, 12)), train=4, val=2)
    with pytest.raises(ConfigError, match=r"001\.png is 20 x 12.*--image-size"):
        _load(path, in_memory="always")
    assert isinstance(_load(path).train, FileSplit)  # left to itself, such a folder is read from disk
    Image.new("RGB", (30, 30)).save(path / "train" / "red" / "000.png")
    with pytest.raises(ConfigError, match=r"--in-memory always.*--image-size"):
        _load(path, in_memory="always")
    data = _load(path, in_memory="always", image_size=10)
    assert _memory(data)[0].images.shape == (8, 3, 10, 10)
    assert (data.input.height, data.input.width) == (10, 10)


def test_images_made_square_keep_their_aspect_ratio(new_folder: NewFolder) -> None:
    """--image-size crops, as its help says, in memory as well as from disk: a centred disc stays round."""
    path = new_folder(train=1, val=1)
    y, x = np.mgrid[0:20, 0:40]
    disc = ((y - 9.5) ** 2 + (x - 19.5) ** 2 < 64).astype(np.uint8) * 255
    for file in path.rglob("*.png"):
        Image.fromarray(np.repeat(disc[:, :, None], 3, 2)).save(file)
    image = _memory(_load(path, in_memory="always", image_size=20))[0].images[0, 0] > 127
    height, width = int(image.any(1).sum()), int(image.any(0).sum())
    assert (height, width) == (16, 16)


def test_a_damaged_image_stops_with_its_name(folder: Path) -> None:
    spoiled = _spoil(folder / "val" / "red" / "002.png")
    with pytest.raises(CorruptImageError, match=spoiled):
        _load(folder)


def test_skip_corrupt_leaves_damaged_images_out_and_lists_them(folder: Path) -> None:
    whole = _load(folder)
    spoiled = [_spoil(folder / name) for name in ("train/blue/003.png", "train/red/000.png", "val/red/004.png")]
    data = _load(folder, skip_corrupt=True)
    train, val = _memory(data)
    assert data.left_out == spoiled
    assert (len(train), len(val)) == (38, 9)
    kept = [index for index in range(40) if index not in (3, 20)]
    assert torch.equal(train.images, _memory(whole)[0].images[kept])
    assert torch.equal(train.labels, _memory(whole)[0].labels[kept])
    assert torch.equal(val.images, _memory(whole)[1].images[:9])


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_without_one_good_image_is_refused(folder: Path, split: str) -> None:
    for file in (folder / split).rglob("*.png"):
        _spoil(file)
    with pytest.raises(DataError, match=f"{folder}"):
        _load(folder, skip_corrupt=True)


@pytest.mark.parametrize("content", [b"", b"no image", "huge"], ids=["empty", "text", "far too large"])
def test_damaged_first_image_does_not_change_how_images_are_held(folder: Path, content: bytes | str) -> None:
    path = folder / "train" / "blue" / "000.png"
    if isinstance(content, str):  # a header that claims 65,536 x 65,536 pixels
        whole = path.read_bytes()
        header = whole[12:16] + b"\x00\x01\x00\x00" * 2 + whole[24:29]
        content = whole[:12] + header + crc32(header).to_bytes(4, "big") + whole[33:]
    path.write_bytes(content)
    data = _load(folder, skip_corrupt=True)
    assert len(_memory(data)[0]) == 39
    assert data.left_out == [str(path)]


def test_color_image_among_gray_ones_keeps_the_set_colored(new_folder: NewFolder) -> None:
    path = new_folder(train=3, val=1)
    for file in path.glob("*/*/000.png"):
        Image.open(file).convert("L").save(file)
    assert _load(path).input.channels == 3
