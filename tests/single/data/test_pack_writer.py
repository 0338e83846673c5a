"""Packing: the form on disk, what is re-encoded, starting again after a kill, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from commands import LOCKSTEP, Job, run, started
from PIL import Image
from time_limits import wait_for_ends

from lockstep.config.schema import DataConfig
from lockstep.data import pack_writer
from lockstep.data.catalog import load
from lockstep.data.inspection import describe
from lockstep.data.pack_writer import Encoding
from lockstep.data.sources.image_folder import list_images
from lockstep.data.sources.pack_reader import MANIFEST_FILE, Manifest, splits
from lockstep.errors import ConfigError, CorruptImageError, DataError
from lockstep.files.atomic import partial_of
from lockstep.files.folder_lock import holding

NewFolder = Callable[..., Path]


def pack_folder(
    folder: Path, out: Path, *, encoding: Encoding | None = None, shard_bytes: int = 8192, skip_corrupt: bool = False
) -> Manifest:
    plan = pack_writer.make_plan(folder, out, encoding or Encoding(), shard_bytes, skip_corrupt)
    return pack_writer.write(plan, 1, lambda count: None)


def _contents(out: Path) -> dict[str, str]:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


PACK = (*LOCKSTEP, "data", "pack")
# The same on a disk that is full as soon as a file has so many bytes.
PACK_WITHIN = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
"""
HALVED = ("--short-side", "300", "--shard-mb", "1", "-j", "2")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder of 8 + 2 noisy images of some 0.5 MB each."""
    generator = np.random.default_rng(0)
    for number in range(10):
        path = tmp_path / "large" / ("val" if number > 7 else "train") / f"class-{number % 2}"
        path.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (400, 450, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{number:02d}.png", compress_level=0)
    return tmp_path / "large"


@contextmanager
def _started_and_blocked(large: Path, out: Path) -> Iterator[Job]:
    """Start packing with 2 processes and wait for a shard. The last image can never be read: it goes no further."""
    os.mkfifo(large / "val" / "class-1" / "last.png")
    with started([*PACK, large, out, *HALVED], large.parent) as job:
        job.wait_until(lambda: [*partial_of(out).glob("train/*.tar")])
        yield job


def _unblock(large: Path) -> None:
    last = large / "val" / "class-1" / "last.png"
    last.unlink()
    shutil.copy(large / "train" / "class-1" / "01.png", last)


def test_samples_are_the_folders_files_in_its_order(folder: Path, tmp_path: Path) -> None:
    manifest = pack_folder(folder, tmp_path / "out")
    classes, *theirs = list_images(folder)
    assert (manifest.name, manifest.classes) == (folder.name, classes)
    assert len(manifest.splits["train"].shards) > 2
    for ours, split in zip(splits(tmp_path / "out", manifest), theirs, strict=True):
        assert list(ours.labels) == list(split.labels)
        assert [bytes(ours.read(sample)) for sample in range(len(ours))] == [path.read_bytes() for path in split.paths]


def test_shards_are_webdataset_tars_of_names_and_contents_alone(folder: Path, tmp_path: Path) -> None:
    """WebDataset: neighbors in the tar with one name up to the first dot of its base make one sample."""
    pack_folder(folder, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "val" / "val-000000.tar") as archive:
        members = archive.getmembers()
        names = [member.name for member in members]
        assert names[:4] == ["blue/000.png", "blue/000.cls", "blue/001.png", "blue/001.cls"]
        assert all(member.isreg() and (member.mtime, member.uid, member.uname) == (0, 0, "") for member in members)
        for member in members[1::2]:
            file = archive.extractfile(member)
            assert file.read() == (b"0" if member.name.startswith("blue") else b"1")
    traces = [
        path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".partial-") or path.suffix == ".json"
    ]
    assert traces == [tmp_path / "out" / MANIFEST_FILE]


def test_keys_are_unique_without_dots_and_survive_odd_names(tmp_path: Path) -> None:
    odd = ["a.b.jpg", "a%2Eb.jpg", "same.jpg", "same.PNG", "ä ö.JPEG", "n" * 150 + ".jpg"]
    for split in ("train", "val"):
        (tmp_path / "in" / split / "class.one" / "deeper").mkdir(parents=True)
        for name in odd:
            Image.new("RGB", (8, 8)).save(tmp_path / "in" / split / "class.one" / "deeper" / name)
    manifest = pack_folder(tmp_path / "in", tmp_path / "out")
    train, _ = splits(tmp_path / "out", manifest)
    named = [train.name(sample).partition("!class.one/deeper/")[2] for sample in range(6)]
    assert sorted(named) == sorted(
        ["a%2Eb.jpg", "a%252Eb.jpg", "same%2Ejpg.jpg", "same%2EPNG.png", "ä ö.jpg", "n" * 150 + ".jpg"]
    )
    with tarfile.open(tmp_path / "out" / "train" / "train-000000.tar") as archive:
        assert [name.rpartition("/")[2] for name in archive.getnames()[::2]] == named


def test_keys_are_unique_where_extensions_are_stacked(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "in" / split / "c").mkdir(parents=True)
        for name in ("a.jpg", "a.png", "a.jpg.png"):
            Image.new("RGB", (8, 8)).save(tmp_path / "in" / split / "c" / name)
    pack_folder(tmp_path / "in", tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "train" / "train-000000.tar") as archive:
        keys = [name.removesuffix(".cls") for name in archive.getnames() if name.endswith(".cls")]
    assert keys == ["c/a%2Ejpg", "c/a%2Ejpg%2Epng", "c/a%2Epng"]


@pytest.mark.parametrize("size", [(100, 60), (60, 100), (200, 60), (61, 61)])
def test_larger_images_are_resized_and_encoded_as_jpeg(
    new_folder: NewFolder, tmp_path: Path, size: tuple[int, int]
) -> None:
    path = new_folder(sizes=(size,), train=2, val=1)
    manifest = pack_folder(path, tmp_path / "out", encoding=Encoding(short_side=30))
    train, _ = splits(tmp_path / "out", manifest)
    with Image.open(io.BytesIO(train.read(0))) as image, Image.open(path / "train" / "blue" / "000.png") as source:
        assert image.format == "JPEG"
        scale = 30 / min(size)
        assert image.size == tuple(round(side * scale) for side in size)
        assert np.abs(np.asarray(image).mean((0, 1)) - np.asarray(source).mean((0, 1))).max() < 3
    assert train.name(0).endswith("!blue/000.jpg")


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK"])
def test_pixels_of_other_modes_become_rgb(mode: str) -> None:
    stored = io.BytesIO()
    Image.new(mode, (40, 40), 1).save(stored, "TIFF")
    content, extension = Encoding(short_side=20).apply(stored.getvalue(), Path("x.tiff"))
    image = Image.open(io.BytesIO(content))
    assert (image.mode, image.size, extension) == ("RGB", (20, 20), "jpg")


def test_an_image_that_was_opened_gets_its_true_extension() -> None:
    stored = io.BytesIO()
    Image.new("RGB", (20, 20)).save(stored, "JPEG")
    assert Encoding(short_side=20).apply(stored.getvalue(), Path("x.png")) == (stored.getvalue(), "jpg")
    assert Encoding().apply(stored.getvalue(), Path("x.png"))[1] == "png"  # nothing is opened


def test_what_jpeg_cannot_store_is_not_called_corrupt(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (140000, 2)).save(folder / "train" / "red" / "long.png")
    with pytest.raises(DataError, match=r"long\.png cannot be stored as JPEG \(.*smaller --short-side") as caught:
        Encoding(short_side=1).apply((folder / "train" / "red" / "long.png").read_bytes(), Path("long.png"))
    assert not isinstance(caught.value, CorruptImageError)


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "bad disk"), OSError(errno.EMFILE, "files"), MemoryError()])
def test_faults_of_the_machine_stop_and_leave_nothing_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    real = pack_writer.read_bytes

    def read_bytes(path: Path, most_bytes: int) -> bytes:
        if path.name == "013.png":
            raise fault
        return real(path, most_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(pack_writer, "read_bytes", read_bytes)
        with pytest.raises(DataError, match="the same command again") as caught:
            pack_folder(folder, tmp_path / "out", skip_corrupt=True)
    assert not isinstance(caught.value, CorruptImageError)
    assert pack_folder(folder, tmp_path / "out", skip_corrupt=True).splits["train"].left_out == ()


def test_killed_packing_can_be_repeated_with_the_same_bytes(large: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with _started_and_blocked(large, killed) as job:
        workers = job.descendants()
        job.kill()
        job.wait(10)
        wait_for_ends(workers)
    assert not killed.exists()
    _unblock(large)
    pack_folder(large, tmp_path / "whole", encoding=Encoding(short_side=300), shard_bytes=1 << 20)
    again = run([*PACK, large, killed, *HALVED], tmp_path, timeout=60)
    assert (again.returncode, again.stderr) == (0, "")
    assert "8 + 3 images, 2 classes" in again.stdout
    assert _contents(killed) == _contents(tmp_path / "whole")


def test_ctrl_c_ends_all_processes_without_a_traceback(large: Path, tmp_path: Path) -> None:
    with _started_and_blocked(large, tmp_path / "out") as job:
        workers = job.descendants()
        for one in [*workers, job]:  # as a terminal does
            one.send_signal(signal.SIGINT)
        assert job.wait(30) == 130
        assert "interrupted" in job.text
        assert "Traceback" not in job.text
        wait_for_ends(workers)
    assert not (tmp_path / "out").exists()
    assert not partial_of(tmp_path / "out").exists()


def test_killed_worker_is_named_and_packing_can_be_repeated(large: Path, tmp_path: Path) -> None:
    with _started_and_blocked(large, tmp_path / "out") as job:
        worker = next(child for child in job.children() if "spawn_main" in " ".join(child.cmdline()))
        worker.kill()
        assert job.wait(30) == 4
        assert "a process was killed" in job.text
        assert "Traceback" not in job.text
    _unblock(large)
    pack_folder(large, tmp_path / "out", encoding=Encoding(short_side=300), shard_bytes=1 << 20)


def test_a_full_disk_is_one_message_and_leaves_no_partial_file(large: Path, tmp_path: Path) -> None:
    words = ["data", "pack", large, tmp_path / "out", "--shard-mb", "4", "-j", "1"]
    done = run([sys.executable, "-c", PACK_WITHIN, str(3 << 20), *words], tmp_path, timeout=60)
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1
    assert "train-000000.tar cannot be written (File too large)" in done.stderr
    assert "run the same command again" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
    pack_folder(large, tmp_path / "out", shard_bytes=4 << 20)


def test_full_disk_leaves_nothing_in_the_way(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(DataError, match=r"cannot be written.*No space left"):
            pack_folder(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert pack_folder(folder, tmp_path / "out").splits["train"].samples == 40


@pytest.mark.parametrize("fix", ["leave out", "mend", "remove"])
def test_every_suggested_fix_for_a_corrupt_image_works(folder: Path, tmp_path: Path, fix: str) -> None:
    spoiled, out, small = folder / "train" / "red" / "010.png", tmp_path / "out", Encoding(short_side=8)
    whole = spoiled.read_bytes()
    spoiled.write_bytes(whole[:100])
    with pytest.raises(CorruptImageError, match=rf"{spoiled}.*--skip-corrupt"):
        pack_folder(folder, out, encoding=small)
    pack_folder(folder, tmp_path / "as-it-is")  # nothing is decoded, so nothing is found
    if fix == "mend":
        spoiled.write_bytes(whole)
    elif fix == "remove":
        spoiled.unlink()
    manifest = pack_folder(folder, out, encoding=small, skip_corrupt=fix == "leave out")
    assert manifest.splits["train"].left_out == ((str(spoiled),) if fix == "leave out" else ())
    assert len(splits(out, manifest)[0].labels) == (40 if fix == "mend" else 39)
    assert pack_folder(folder, tmp_path / "other", encoding=small, skip_corrupt=True) == manifest
    assert _contents(out) == _contents(tmp_path / "other")


def test_links_that_lead_nowhere_are_missing_files(folder: Path, tmp_path: Path) -> None:
    link = folder / "train" / "red" / "zz.png"
    link.symlink_to("nowhere.png")
    with pytest.raises(CorruptImageError, match=r"zz\.png cannot be read"):
        pack_folder(folder, tmp_path / "out")
    assert pack_folder(folder, tmp_path / "out", skip_corrupt=True).splits["train"].left_out == (str(link),)
    assert describe(folder).splits[0].unreadable == 1


def test_a_pack_and_its_folder_have_one_name_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    names = {load(DataConfig(dataset=str(tmp_path / "link"))).name, pack_folder(tmp_path / "link", tmp_path / "o").name}
    assert names == {"link"}


def test_two_packings_do_not_write_one_pack(folder: Path, tmp_path: Path) -> None:
    partial_of(tmp_path / "out").mkdir()
    with holding(partial_of(tmp_path / "out"), "another"), pytest.raises(ConfigError, match="in use by another"):
        pack_folder(folder, tmp_path / "out")
    pack_folder(folder, tmp_path / "out")


def test_places_that_cannot_be_packed_to_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full" / "sub").mkdir(parents=True)
    for out, words in (
        ("images/out", "contain each other"),
        (".", "contain each other"),
        ("file", "already exists"),
        ("full", "already exists"),
    ):
        with pytest.raises(ConfigError, match=words):
            pack_folder(folder, tmp_path / out)
    pack_folder(folder, tmp_path / "out")
    before = _contents(tmp_path / "out")
    with pytest.raises(ConfigError, match="out already exists; choose a new folder, or remove it"):
        pack_folder(folder, tmp_path / "out")
    assert _contents(tmp_path / "out") == before
    with pytest.raises(DataError, match="already packed"):
        pack_folder(tmp_path / "out", tmp_path / "again")
    with pytest.raises(DataError, match="not a folder"):
        pack_folder(tmp_path / "nowhere", tmp_path / "again")
    assert not (tmp_path / "again").exists()
