"""Copies of files and folders by one tar stream: equal to their sources, or an error that names the path."""

from __future__ import annotations

import io
import mmap
import os
import random
import re
import socket
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from disks import largest_file

from lockstep.launch.staging.stage_options import PREFIX
from lockstep.launch.staging.stager import REMOVE, make_folder
from lockstep.launch.staging.tar_stream import CHUNK_BYTES, CopyError, OpenedPath, SharedSource, pack, unpack


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with files of zero bytes to several chunks."""
    folder = tmp_path / "source"
    (folder / "deep" / "empty").mkdir(parents=True)
    for name, size in (("a", 10), ("b", 0), ("deep/c", 2 * CHUNK_BYTES + 5), ("deep/d.sh", 7), ("x" * 250, 512)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    (folder / "deep" / "d.sh").chmod(0o555)
    return folder


def _packed(*sources: SharedSource) -> io.BytesIO:
    stream = io.BytesIO()
    pack(sources, stream)
    stream.seek(0)
    return stream


def _copy(path: Path, folder: Path, is_environment: bool = False, left_out: tuple[str, ...] = ()) -> Path:
    """Copy a source as a stager does; return the copy."""
    folder.mkdir()
    unpack(_packed(SharedSource(os.path.realpath(path), left_out, is_environment)), folder)
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
    unpack(_packed(*(SharedSource(str(tmp_path / name)) for name in ("one", "source", "none"))), tmp_path / "disk")
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
    copy = _copy(source, tmp_path / "disk", left_out=(str(source / "deep"),))
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


class _OpenedSource(SharedSource):
    """A source whose opened paths are known."""

    opened: ClassVar[set[str]] = set()

    def open(self, path: str) -> OpenedPath:
        opened = super().open(path)
        self.opened.add(path)
        return opened


class _ChangingStream(io.BytesIO):
    """Calls a function when the first chunk of deep/c is written: the small files have been read."""

    def __init__(self, source: Path, change: Callable[[], object]) -> None:
        super().__init__()
        self._paths = {str(path) for path in (source, *source.rglob("*"))}
        self._change: Callable[[], object] | None = change

    def write(self, data: Any) -> int:
        if self._change:
            while not self._paths <= _OpenedSource.opened:  # threads open what comes after deep/c
                time.sleep(0.001)
            self._change()
        self._change = None
        return super().write(data)


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
    with pytest.raises(CopyError, match=message):
        pack([_OpenedSource(str(source))], _ChangingStream(source, lambda: change(source)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace, "/a has changed while it was copied"),
        (Path.unlink, "/a cannot be read: No such file or directory"),
        (lambda path: (path.unlink(), path.symlink_to("b")), "/source has changed while it was copied"),
    ],
    ids=["pipe", "removed", "link"],
)
def test_file_that_is_replaced_after_the_listing_is_named(
    source: Path, change: Callable[[Path], object], message: str
) -> None:
    class Changed(SharedSource):
        def open(self, path: str) -> OpenedPath:
            opened = super().open(path)
            if path == str(source):
                change(source / "a")
            return opened

    with pytest.raises(CopyError, match=message):
        pack([Changed(str(source))], io.BytesIO())


def test_link_to_a_file_while_it_is_read_changes_nothing(source: Path, tmp_path: Path) -> None:
    def change() -> None:
        (tmp_path / "link").hardlink_to(source / "deep" / "c")  # as uv and conda do
        (source / "__pycache__").mkdir()

    pack([_OpenedSource(str(source), is_environment=True)], _ChangingStream(source, change))
    assert (source / "__pycache__").exists()


def test_only_the_copy_of_an_environment_is_writable(source: Path, tmp_path: Path) -> None:
    (source / "module.pyc.1234").write_bytes(b"Python writes it")
    data, environment = (_copy(source, tmp_path / str(writable), writable) for writable in (False, True))
    modes = [stat.S_IMODE((copy / name).stat().st_mode) for copy in (data, environment) for name in ("deep", "a")]
    assert modes == [0o555, 0o444, 0o755, 0o644]
    assert not (environment / "module.pyc.1234").exists()


def test_full_disk_is_an_error(source: Path, tmp_path: Path) -> None:
    with largest_file(CHUNK_BYTES), pytest.raises(OSError, match="File too large"):
        _copy(source, tmp_path / "disk")


@pytest.mark.parametrize("name", ["../a", "0/../../a"])
def test_member_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    stream = tarfile.TarInfo(name).tobuf() + bytes(1024)
    with pytest.raises(tarfile.TarError, match="outside the destination"):
        unpack(io.BytesIO(stream), tmp_path)
    with pytest.raises(tarfile.TarError):
        unpack(io.BytesIO(b"damaged" * 200), tmp_path)


def test_folder_of_copies_is_removed_with_its_read_only_contents(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}1"
    make_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    unpack(_packed(SharedSource(str(source))), folder)
    with pytest.raises(CopyError, match=r"other hosts share .* by --stage-dir"):
        make_folder(folder)
    subprocess.run([*REMOVE, folder], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_only_abandoned_folders_of_this_host_are_removed(source: Path, tmp_path: Path) -> None:
    host = socket.gethostname()
    for name in ("0", "1", "2"):  # the next ones find this process's lock
        make_folder(tmp_path / f"{PREFIX}{name}")
    for name in ("killed", "elsewhere"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}.{host if name == 'killed' else 'another'}").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(source)
    (tmp_path / f"{PREFIX}link.{host}").touch()
    make_folder(tmp_path / f"{PREFIX}3")
    kept = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir() if path.is_dir()}
    assert kept == {"0", "1", "2", "3", "elsewhere", "source"}
    assert (source / "a").exists()


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match=re.escape("cannot be created: No such file or directory; choose another")):
        make_folder(tmp_path / "missing" / "disk")
