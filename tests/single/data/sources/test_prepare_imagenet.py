"""ImageNet from archives of the official form, made small: three classes whose numbers are not in the names' order."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packs import tar_of
from PIL import Image

from lockstep.config.schema import DataConfig
from lockstep.data import catalog
from lockstep.data.sources.prepare_imagenet import look, numbered_classes, prepare
from lockstep.errors import ConfigError, DataError
from lockstep.files.folder_lock import holding

CLASSES = {1: "n03000000", 2: "n01000000", 3: "n02000000"}
NAMES = (*CLASSES.values(),)
TRUTH = [2, 3, 1, 1, 2]
Archives = tuple[Path, Path, Path]


def _jpeg(value: int) -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (20, 20), (value, 0, 0)).save(stored, "JPEG")
    return stored.getvalue()


def _train_members() -> dict[str, bytes]:
    return {
        f"{name}.tar": tar_of({f"{name}_{image}.JPEG": _jpeg(10 * number + image) for image in (3, 10, 7)})
        for number, name in CLASSES.items()
    }


def _val_members() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{number:08d}.JPEG": _jpeg(100 + number) for number in range(1, len(TRUTH) + 1)}


def _write_devkit(path: Path, truth: list[int]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (
            ("data/ILSVRC2012_validation_ground_truth.txt", "".join(f"{n}\n" for n in truth).encode()),
        ):
            info = tarfile.TarInfo(f"ILSVRC2012_devkit_t12/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def archives(tmp_path: Path) -> Archives:
    train, val, devkit = (tmp_path / name for name in ("train.tar", "val.tar", "devkit.tar.gz"))
    train.write_bytes(tar_of(_train_members()))
    val.write_bytes(tar_of(_val_members()))
    _write_devkit(devkit, TRUTH)
    return train, val, devkit


def _prepare(archives: Archives, folder: Path) -> tuple[int, int]:
    return prepare(look(*archives, NAMES), folder, lambda count: None)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.cold
def test_the_tree_has_every_image_in_its_class(archives: Archives, tmp_path: Path) -> None:
    assert _prepare(archives, tmp_path / "dest") == (9, 5)
    expected = {
        f"train/{name}/{name}_{image}.JPEG": _jpeg(10 * number + image)
        for number, name in CLASSES.items()
        for image in (3, 10, 7)
    }
    for (file, content), number in zip(_val_members().items(), TRUTH, strict=True):
        expected[f"val/{CLASSES[number]}/{file}"] = content
    assert _tree(tmp_path / "dest") == expected
    data = catalog.load(DataConfig(dataset=str(tmp_path / "dest")))
    assert data.classes == tuple(sorted(CLASSES.values()))
    assert (len(data.train), len(data.val)) == (9, 5)


def test_it_continues_after_a_cut_and_keeps_complete_folders(archives: Archives, tmp_path: Path) -> None:
    train, dest = archives[0], tmp_path / "dest"
    whole = train.read_bytes()
    ready = look(*archives, NAMES)
    train.write_bytes(whole[: ready.train_tars["n02000000"][0] + 700])  # cut in its third class's first image
    with pytest.raises(DataError, match=f"{train}.*download it again"):
        prepare(ready, dest, lambda count: None)
    assert (dest / "train" / "n03000000").is_dir()
    assert not (dest / "train" / "n02000000").exists()
    train.write_bytes(whole)
    kept = dest / "train" / "n03000000" / "n03000000_10.JPEG"
    changed = kept.stat().st_mtime_ns
    assert _prepare(archives, dest) == (9, 5)
    assert kept.stat().st_mtime_ns == changed
    _prepare(archives, tmp_path / "other")
    assert _tree(dest) == _tree(tmp_path / "other")
    (dest / "train" / "n03000000" / "n03000000_3.JPEG").write_bytes(b"short")
    with pytest.raises(DataError, match=r"n03000000 differs from the archive in n03000000_3\.JPEG; remove it"):
        _prepare(archives, dest)


def _order(*places: int) -> Callable[[Archives], Archives]:
    return lambda archives: (archives[places[0]], archives[places[1]], archives[places[2]])


def _cut(which: int, share: float) -> Callable[[Archives], Archives]:
    def act(archives: Archives) -> Archives:
        content = archives[which].read_bytes()
        archives[which].write_bytes(content[: int(share * len(content))])
        return archives

    return act


def _missing(archives: Archives) -> Archives:
    archives[1].unlink()
    return archives


def _other_labels(*truth: int) -> Callable[[Archives], Archives]:
    def act(archives: Archives) -> Archives:
        _write_devkit(archives[2], list(truth))
        return archives

    return act


def _without_a_class(archives: Archives) -> Archives:
    members = _train_members()
    members.popitem()
    archives[0].write_bytes(tar_of(members))
    return archives


def _text(archives: Archives) -> Archives:
    archives[0].write_text("not an archive")
    return archives


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_order(1, 0, 2), r"val\.tar: expected the training archive, found the validation.*TRAIN.tar VAL.tar"),
        (_order(0, 2, 1), r"devkit\.tar\.gz: .* found the devkit archive"),
        (_missing, r"validation archive .*val\.tar not found"),
        (_text, r"training archive .*train\.tar is damaged or not a tar"),
        (_cut(0, 0.5), r"train\.tar.*download it again"),
        (_cut(1, 0.5), r"val\.tar.*download it again"),
        (_cut(2, 0.5), r"devkit.*download it again"),
        (_without_a_class, "n02000000"),
        (_other_labels(1, 2, 3), "has 5 images, but the devkit labels 3"),
        (_other_labels(1, 2, 3, 4, 1), "class 4, but there are 3"),
    ],
)
def test_wrong_archives_are_named_with_the_fix(
    archives: Archives, tmp_path: Path, spoil: Callable[[Archives], Archives], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        _prepare(spoil(archives), tmp_path / "dest")


def _link(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "name", ["../../../escaped.JPEG", "{outside}/escaped.JPEG", "n03000000_1/../../../../escaped.JPEG", "link"]
)
@pytest.mark.parametrize("where", ["training", "class", "validation"])
def test_members_that_would_leave_the_folder_are_refused(
    archives: Archives, tmp_path: Path, name: str, where: str
) -> None:
    """DEST lies so deep that each name, taken at its word, ends below tmp_path, where it would be seen."""
    dest = tmp_path / "a" / "b" / "dest"
    hostile = _link("n03000000_1.JPEG") if name == "link" else tarfile.TarInfo(name.format(outside=tmp_path))
    members = _train_members()
    if where == "class":
        with tarfile.open(fileobj=(bad := io.BytesIO()), mode="w") as archive:
            archive.addfile(hostile)
        members["n03000000.tar"] = bad.getvalue()
        archives[0].write_bytes(tar_of(members))
    else:
        with tarfile.open(archives[0 if where == "training" else 1], "a") as archive:
            archive.addfile(hostile)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=hostile.name.replace(".", r"\.")):
        _prepare(archives, dest)
    new = {path for path in tmp_path.rglob("*") if dest not in (path, *path.parents)} - before
    assert new <= {tmp_path / "a", tmp_path / "a" / "b"}
    assert not any(path.is_symlink() for path in dest.rglob("*"))


@pytest.mark.parametrize("spoil", [lambda header: b"\0" * 512, lambda header: header[:150] + b"\1" + header[151:]])
@pytest.mark.parametrize("where", ["class", "training", "validation"])
def test_damaged_header_between_images_is_not_taken_for_the_end(
    archives: Archives, tmp_path: Path, where: str, spoil: Callable[[bytes], bytes]
) -> None:
    ready = look(*archives, NAMES)
    path = archives[1 if where == "validation" else 0]
    content = bytearray(path.read_bytes())
    begin = ready.train_tars["n03000000"][0] if where == "class" else 0
    with tarfile.open(fileobj=io.BytesIO(content[begin:])) as archive:
        start = begin + archive.getmembers()[1].offset
    content[start : start + 512] = spoil(bytes(content[start : start + 512]))
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} is truncated or damaged.*expected a tar header at byte {start:,}"):
        _prepare(archives, tmp_path / "dest")


def test_repeated_command_keeps_the_names_of_a_whole_folder(archives: Archives, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    _prepare(archives, dest)
    before = {path: path.stat().st_ctime_ns for path in dest.rglob("*")}  # which a new name changes
    assert _prepare(archives, dest) == (9, 5)
    assert {path: path.stat().st_ctime_ns for path in dest.rglob("*")} == before


@pytest.mark.parametrize("part", ["train", "val"])
def test_foreign_files_are_refused_before_anything_is_renamed(archives: Archives, tmp_path: Path, part: str) -> None:
    dest = tmp_path / "dest"
    _prepare(archives, dest)
    (dest / part / "n01000000" / "mine.JPEG").touch()
    before = sorted(dest.rglob("*"))
    with pytest.raises(DataError, match=r"differs from the archive in (n01000000/)?mine\.JPEG; remove it"):
        _prepare(archives, dest)
    assert sorted(dest.rglob("*")) == before


def test_two_commands_do_not_write_one_folder(archives: Archives, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    with holding(tmp_path / "dest", "another"), pytest.raises(ConfigError, match="in use by another"):
        _prepare(archives, tmp_path / "dest")
    assert _prepare(archives, tmp_path / "dest") == (9, 5)


def test_progress_ends_at_the_archives_sizes(archives: Archives, tmp_path: Path) -> None:
    for _ in ("first", "again"):
        done: list[int] = []
        prepare(look(*archives, NAMES), tmp_path / "dest", done.append)
        assert sum(done) == archives[0].stat().st_size + archives[1].stat().st_size


def test_reading_and_writing_errors_are_distinguished(archives: Archives, tmp_path: Path) -> None:
    ready = look(*archives, NAMES)
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "train").touch()
    with pytest.raises(DataError, match=r"train/n.* cannot be written"):
        prepare(ready, tmp_path / "dest", lambda count: None)
    archives[0].unlink()
    with pytest.raises(DataError, match=r"train\.tar cannot be read"):
        prepare(ready, tmp_path / "other", lambda count: None)


def test_a_devkit_that_unpacks_without_end_is_one_message(archives: Archives) -> None:
    archives[2].write_bytes(gzip.compress(tar_of({"ILSVRC2012_devkit_t12/readme": bytes(65 << 20)}), 1))
    with pytest.raises(DataError, match="unpacks to more than 67,108,864 bytes"):
        look(*archives, NAMES)


def test_the_classes_are_imagenets() -> None:
    names = numbered_classes()
    assert (names[0], names[999]) == ("n02119789", "n03255030")  # kit fox and dumbbell
    assert sorted(names) == pytest.importorskip("timm.data").ImageNetInfo().label_names()


def test_a_folder_with_other_things_is_left_alone(archives: Archives, tmp_path: Path) -> None:
    other = tmp_path / "dest" / "train" / "cats"
    other.mkdir(parents=True)
    with pytest.raises(DataError, match="cats, which is not in the archives"):
        _prepare(archives, tmp_path / "dest")
    assert list((tmp_path / "dest").rglob("*")) == [tmp_path / "dest" / "train", other]
