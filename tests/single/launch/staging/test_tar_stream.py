"""Copies of files and folders by one tar stream: equal to their sources, or an error that names the path."""

from __future__ import annotations

import io
import mmap
import os
import random
import re
import socket
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import largest_file

from lockstep.launch.staging.copies_folder import CopiesFolder
from lockstep.launch.staging.stage_options import PREFIX
from lockstep.launch.staging.tar_stream import CHUNK_BYTES, CopyError, SharedSource, pack, unpack


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with files of zero bytes to several chunks."""
    folder = tmp_path / "source"
    (folder / "deep" / "empty").mkdir(parents=True)
    for name, size in (("a", 10), ("b", 0), ("deep/c", 2 * CHUNK_BYTES + 5), ("deep/d.sh", 7), ("x" * 250, 512)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    (folder / "deep" / "d.sh").chmod(0o555)
    return folder


def _copy(path: Path, folder: Path, is_environment: bool = False, left_out: tuple[str, ...] = ()) -> Path:
    """Copy a source as a stager does; return the copy."""
    folder.mkdir()
    stream = b"".join(pack([SharedSource(os.path.realpath(path), left_out, is_environment)]))
    unpack(io.BytesIO(stream), folder)
    (copy,) = (folder / "0").iterdir()
    return copy


def _contents(folder: Path) -> dict[str, object]:
    """Return the content of each file, the target of each link, and None for folders, by relative path."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_copy_has_the_contents_modes_and_times(source: Path, tmp_path: Path) -> None:
    copy = _copy(source, tmp_path / "disk")
    assert _contents(copy) == _contents(source)
    for name in ("a", "deep/c", "deep/d.sh"):
        before, after = (source / name).stat(), (copy / name).stat()
        assert (int(after.st_mtime), after.st_mode & 0o111) == (int(before.st_mtime), before.st_mode & 0o111)


def test_several_sources_are_one_stream(source: Path, tmp_path: Path) -> None:
    for name, content in (("one", b"content"), ("none", b"")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "disk").mkdir()
    sources = [SharedSource(str(tmp_path / name)) for name in ("one", "source", "none")]
    files, size = unpack(io.BytesIO(b"".join(pack(sources))), tmp_path / "disk")
    assert (files, size) == (7, 7 + sum(path.stat().st_size for path in source.rglob("*") if path.is_file()))
    assert [(tmp_path / "disk" / name).read_bytes() for name in ("0/one", "2/none")] == [b"content", b""]
    assert _contents(tmp_path / "disk" / "1" / "source") == _contents(source)


def test_links_lead_to_the_same_files(source: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("outside")
    (tmp_path / "alias").symlink_to(source)
    links = {
        "deep/through": "way/../a",
        "deep/way": "../deep/empty",
        "alias": str(tmp_path / "alias" / "a"),
        "deep/relative": "../a",
        "deep/absolute": str(source / "a"),
        "out": str(tmp_path / "outside" / "file"),
        "folder": "../outside",
        "dangling": "nowhere",
        "up": "..",
        "itself": ".",
    }
    for name, target in links.items():
        (source / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.bind(str(source / "socket"))
    os.mkfifo(source / "pipe")
    copy = _copy(source, tmp_path / "disk")
    assert [os.readlink(copy / name) for name in ("deep/absolute", "alias", "itself")] == ["../a", "a", "."]
    assert (copy / "deep" / "through").exists() == (source / "deep" / "through").exists()
    assert (copy / "deep" / "relative").read_bytes() == (source / "a").read_bytes()
    assert not (copy / "out").is_symlink()
    assert (copy / "out").read_text() == "outside"
    assert (copy / "folder" / "file").read_text() == "outside"
    assert (copy / "dangling").is_symlink()
    assert os.path.realpath(copy / "up") == os.path.realpath(source / "up")
    assert not (copy / "socket").exists()
    assert not (copy / "pipe").exists()


def test_left_out_folder_is_not_copied_but_its_files_are_linked(source: Path, tmp_path: Path) -> None:
    (source / "link").symlink_to("deep/d.sh")
    copy = _copy(source, tmp_path / "disk", left_out=("deep",))
    assert not (copy / "deep").exists()
    assert (copy / "link").read_bytes() == (source / "deep" / "d.sh").read_bytes()


def test_sparse_file_stays_sparse(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(16 << 20)
        file.seek(5 << 20)
        file.write(b"data")
    copy = _copy(tmp_path / "sparse", tmp_path / "disk")
    assert copy.read_bytes() == (tmp_path / "sparse").read_bytes()
    assert copy.stat().st_blocks * 512 <= 2 * CHUNK_BYTES


def test_file_written_through_a_mapping_is_copied(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 8192)
    with open(tmp_path / "x", "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[0:1] = b"b"
        assert _copy(tmp_path / "x", tmp_path / "disk").read_bytes() == b"b" + b"a" * 8191


def _replace(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda source: (source / "deep" / "c").write_bytes(b"0123456789"), "deep/c has changed while it was copied"),
        (lambda source: os.truncate(source / "deep" / "c", 3 * CHUNK_BYTES), "deep/c has changed while it was copied"),
        (lambda source: os.utime(source / "deep" / "c", (1, 1)), "deep/c has changed while it was copied"),
        (lambda source: (source / "new").touch(), "source has changed while it was copied"),
        (lambda source: (source / "a").rename(source / "deep" / "a"), "source has changed while it was copied"),
        (lambda source: (source / "deep" / "empty").rmdir(), "deep has changed while it was copied"),
    ],
    ids=["shorter", "longer", "time", "new", "moved", "no-folder"],
)
def test_source_that_changes_while_it_is_read_is_named(
    source: Path, change: Callable[[Path], object], message: str
) -> None:
    chunks = pack([SharedSource(str(source))])
    next(chunks)  # the small files have been read, and deep/c was opened
    change(source)
    with pytest.raises(CopyError, match=message):
        list(chunks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace, "/a has changed while it was copied"),
        (Path.unlink, "/a cannot be read: No such file or directory"),
        (lambda path: (path.unlink(), path.symlink_to("b")), "/a cannot be read: Too many levels of symbolic links"),
    ],
    ids=["pipe", "removed", "link"],
)
def test_file_that_is_replaced_after_the_listing_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str
) -> None:
    entries = SharedSource.entries

    def changed(*arguments: object) -> list[object]:
        found = list(entries(*arguments))  # type: ignore[arg-type]
        change(source / "a")
        return found  # type: ignore[return-value]

    monkeypatch.setattr(SharedSource, "entries", changed)
    with pytest.raises(CopyError, match=message):
        list(pack([SharedSource(str(source))]))


def test_link_to_a_file_while_it_is_read_changes_nothing(source: Path, tmp_path: Path) -> None:
    chunks = pack([SharedSource(str(source), is_environment=True)])  # uv and conda link the files of an environment
    first = next(chunks)
    (tmp_path / "link").hardlink_to(source / "deep" / "c")
    (source / "__pycache__").mkdir()
    (tmp_path / "disk").mkdir()
    unpack(io.BytesIO(first + b"".join(chunks)), tmp_path / "disk")


def test_only_the_copy_of_an_environment_is_writable(source: Path, tmp_path: Path) -> None:
    (source / "module.pyc.1234").write_bytes(b"Python writes it")
    data, environment = (_copy(source, tmp_path / str(writable), writable) for writable in (False, True))
    modes = [stat.S_IMODE((copy / name).stat().st_mode) for copy in (data, environment) for name in ("deep", "a")]
    assert modes == [0o555, 0o444, 0o755, 0o644]
    assert not (environment / "module.pyc.1234").exists()


def test_full_disk_is_an_error(source: Path, tmp_path: Path) -> None:
    with largest_file(CHUNK_BYTES), pytest.raises(OSError, match="File too large"):
        _copy(source, tmp_path / "disk")


@pytest.mark.parametrize("name", ["../a", "/a", "0/../../a"])
def test_member_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    stream = tarfile.TarInfo(name).tobuf() + bytes(1024)
    with pytest.raises(tarfile.TarError, match="is not a name of a member"):
        unpack(io.BytesIO(stream), tmp_path)
    with pytest.raises(tarfile.TarError):
        unpack(io.BytesIO(b"damaged" * 200), tmp_path)


def test_folder_of_copies_is_removed_with_its_read_only_contents(source: Path, tmp_path: Path) -> None:
    folder = CopiesFolder(str(tmp_path / f"{PREFIX}1"))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    unpack(io.BytesIO(b"".join(pack([SharedSource(str(source))]))), folder.path)
    with pytest.raises(CopyError, match=r"other hosts share .* by --stage-dir"):
        CopiesFolder(str(folder.path))
    folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_only_abandoned_folders_of_this_host_are_removed(tmp_path: Path) -> None:
    kept, elsewhere, abandoned = (CopiesFolder(str(tmp_path / f"{PREFIX}{number}")) for number in range(3))
    for folder in (elsewhere, abandoned):
        os.close(folder._owner)  # as if its process had been killed
    (elsewhere.path / "owner").write_text("another host")
    (tmp_path / f"{PREFIX}3-removed").mkdir()
    (tmp_path / f"{PREFIX}4").symlink_to(tmp_path / f"{PREFIX}0")
    last = CopiesFolder(str(tmp_path / f"{PREFIX}5"))
    names = [path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()]
    assert sorted(names) == ["0", "1", "4", "5"]
    for folder in (kept, last):
        folder.remove()


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match=re.escape("cannot be created: No such file or directory; choose another")):
        CopiesFolder(str(tmp_path / "missing" / "disk"))
