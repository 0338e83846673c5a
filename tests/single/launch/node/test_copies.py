"""Copies of shared files on a host's disk: complete and current, or not used."""

from __future__ import annotations

import os
import random
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import largest_file

from lockstep.launch.node import copies
from lockstep.launch.node.copies import (
    Copies,
    CopyError,
    Draft,
    files_of,
    hold,
    is_whole,
    read_blocks,
    scan,
)
from lockstep.launch.plan.stage_options import BLOCK_BYTES


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with files of zero bytes to several blocks."""
    folder = tmp_path / "source"
    (folder / "deep" / "empty").mkdir(parents=True)
    for name, size in (("a", 10), ("b", 0), ("deep/c", 2 * BLOCK_BYTES + 5), ("deep/d.sh", 7)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    (folder / "deep" / "d.sh").chmod(0o555)
    return folder


def _copy(folder: Path, source: Path, is_writable: bool = False) -> Path:
    """Copy a source as a stager does; return the copy."""
    manifest, local = scan(str(source), is_writable=is_writable), Copies(str(folder))
    if not local.find(manifest.name):
        draft = local.unfinished(manifest.name) or local.begin(manifest)
        for block in read_blocks(os.path.realpath(source), manifest, draft.blocks):
            draft.write(block)
        local.finish(draft)
    for lock in local.locks.values():  # as if its process had ended
        os.close(lock)
    return Path(files_of(folder / manifest.name, manifest))


def _contents(folder: Path) -> dict[str, object]:
    """Return the content of each file, the target of each link, and None for folders, by relative path."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def test_copy_has_the_contents_modes_and_times(source: Path, tmp_path: Path) -> None:
    copy = _copy(tmp_path / "disk", source)
    assert _contents(copy) == _contents(source)
    for name in ("a", "deep/c", "deep/d.sh"):
        before, after = (source / name).stat(), (copy / name).stat()
        assert (after.st_mtime_ns, after.st_mode & 0o111) == (before.st_mtime_ns, before.st_mode & 0o111)


def test_single_file_and_an_empty_one_are_copied(tmp_path: Path) -> None:
    for name, content in (("one", b"content"), ("none", b"")):
        (tmp_path / name).write_bytes(content)
        assert _copy(tmp_path / "disk", tmp_path / name).read_bytes() == content


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
    }
    for name, target in links.items():
        (source / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.bind(str(source / "socket"))
    copy = _copy(tmp_path / "disk", source)
    assert [os.readlink(copy / name) for name in ("deep/absolute", "alias")] == ["../a", "a"]
    assert (copy / "deep" / "through").exists() == (source / "deep" / "through").exists()
    assert (copy / "deep" / "relative").read_bytes() == (source / "a").read_bytes()
    assert not (copy / "out").is_symlink()
    assert (copy / "out").read_text() == "outside"
    assert (copy / "folder" / "file").read_text() == "outside"
    assert (copy / "dangling").is_symlink()
    assert not (copy / "socket").exists()


def test_source_may_be_a_link_to_a_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    copy = _copy(tmp_path / "disk", tmp_path / "link")
    assert _contents(copy) == _contents(source)


def _rewrite(source: Path) -> None:
    file = source / "deep" / "d.sh"
    before = file.stat()
    file.chmod(0o755)
    file.write_bytes(b"another")
    file.chmod(0o555)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        _rewrite,
        lambda source: (source / "a").write_bytes(b"longer than before"),
        lambda source: (source / "a").chmod(0o700),
        lambda source: (source / "a").rename(source / "e"),
        lambda source: (source / "deep" / "new").mkdir(),
        lambda source: (source / "deep" / "empty").rmdir(),
    ],
    ids=["content", "size", "mode", "name", "new-folder", "no-folder"],
)
def test_copy_of_what_has_changed_is_not_used(source: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    before = _copy(tmp_path / "disk", source)
    change(source)
    after = _copy(tmp_path / "disk", source)
    assert after != before
    assert _contents(after) == _contents(source)


def test_file_that_changes_while_it_is_read_is_an_error(source: Path) -> None:
    manifest = scan(str(source))
    (source / "a").write_bytes(b"0123456789")
    with pytest.raises(CopyError, match=r"/a has changed while it was copied"):
        list(read_blocks(str(source), manifest))


def test_file_that_is_linked_while_it_is_read_is_copied(source: Path) -> None:
    manifest = scan(str(source))
    (source / "deep" / "link").hardlink_to(source / "a")
    assert len([*read_blocks(str(source), manifest)]) == manifest.blocks


def test_file_that_cannot_be_read_is_named(source: Path) -> None:
    manifest = scan(str(source))
    (source / "a").unlink()
    (source / "a").mkdir()
    with pytest.raises(CopyError, match=r"/a cannot be read: Is a directory"):
        list(read_blocks(str(source), manifest))


def test_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match=r"/nothing does not exist, or is neither a file nor a folder"):
        scan(str(tmp_path / "nothing"))


def _interrupted(folder: Path, source: Path, blocks: int) -> Draft:
    manifest = scan(str(source))
    draft = Copies(str(folder)).begin(manifest)
    for block, _ in zip(read_blocks(str(source), manifest), range(blocks), strict=False):
        draft.write(block)
    os.close(draft.lock)  # as if its process had ended
    return draft


def test_interrupted_copy_goes_on_after_its_last_good_block(source: Path, tmp_path: Path) -> None:
    first = _interrupted(tmp_path / "disk", source, 2)
    draft = Copies(str(tmp_path / "disk")).unfinished(first.manifest.name)
    assert draft is not None
    assert draft.blocks == 2
    os.close(draft.lock)
    file = first.folder / "files" / "source" / "deep" / "c"
    with file.open("r+b") as damaged:
        damaged.seek(BLOCK_BYTES + 100)
        damaged.write(b"damaged")
    draft = Copies(str(tmp_path / "disk")).unfinished(first.manifest.name)
    assert draft is not None
    assert draft.blocks == 1
    os.close(draft.lock)
    assert _contents(_copy(tmp_path / "disk", source)) == _contents(source)


def test_copy_that_another_process_writes_is_left_alone(source: Path, tmp_path: Path) -> None:
    manifest, local = scan(str(source)), Copies(str(tmp_path / "disk"))
    first = local.begin(manifest)
    assert Copies(str(tmp_path / "disk")).unfinished(manifest.name) is None
    copy = _copy(tmp_path / "disk", source)  # the second process is faster
    for block in read_blocks(str(source), manifest):
        first.write(block)
    local.finish(first)
    assert _contents(copy) == _contents(source)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [manifest.name]


def _unlock(copy: Path) -> None:
    """Let everything be written, as root can anyway."""
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: (copy / "a").unlink(),
        lambda copy: (copy / "a").write_bytes(b"0123456789abc"),
        lambda copy: os.utime(copy / "a", (0, 0)),
        lambda copy: (copy / "deep" / "empty").rmdir(),
        lambda copy: (copy / "deep" / "labels.cache").write_text("of another job"),
        lambda copy: (copy / "deep" / "empty").rename(copy / "deep" / "renamed"),
        lambda copy: (copy.parents[1] / "manifest").write_bytes(b"damaged"),
        lambda copy: (copy.parents[1] / "boot").write_text("another start"),
    ],
    ids=["removed", "longer", "time", "folder", "extra", "renamed", "manifest", "reboot"],
)
def test_copy_that_was_damaged_is_made_again(source: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    copy = _copy(tmp_path / "disk", source)
    _unlock(copy)
    damage(copy)
    assert not is_whole(copy.parents[1])
    assert _copy(tmp_path / "disk", source) == copy
    assert _contents(copy) == _contents(source)
    assert len([*(tmp_path / "disk").iterdir()]) == 1


def test_link_that_replaced_a_file_is_not_followed(source: Path, tmp_path: Path) -> None:
    copy = _copy(tmp_path / "disk", source)
    _unlock(copy)
    for name in ("a", "b"):
        (tmp_path / name).write_text("precious")
        (copy / name).unlink()
        (copy / name).symlink_to(tmp_path / name)
    assert _contents(_copy(tmp_path / "disk", source)) == _contents(source)
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["precious", "precious"]


def test_only_the_copy_of_an_environment_is_writable(source: Path, tmp_path: Path) -> None:
    data, environment = (_copy(tmp_path / "disk", source, is_writable) for is_writable in (False, True))
    modes = [stat.S_IMODE((copy / "deep").stat().st_mode) for copy in (data, environment)]
    assert modes == [0o555, 0o755]
    (environment / "__pycache__").mkdir()
    (environment / "__pycache__" / "new.pyc").touch()
    assert is_whole(environment.parents[1])


def test_bytecode_that_python_replaced_does_not_count(source: Path, tmp_path: Path) -> None:
    (source / "module.pyc").write_bytes(b"old")
    (source / "other.pyc.1234").write_bytes(b"Python writes it")
    copy = _copy(tmp_path / "disk", source, is_writable=True)
    (copy / "module.pyc").write_bytes(b"newer")
    assert is_whole(copy.parents[1])
    assert not (copy / "other.pyc.1234").exists()


def test_damaged_copy_in_use_is_an_error(source: Path, tmp_path: Path) -> None:
    copy = _copy(tmp_path / "disk", source)
    held = hold(str(copy))
    _unlock(copy)
    (copy / "a").unlink()
    with pytest.raises(CopyError, match=r"is damaged, and another job uses it"):
        _copy(tmp_path / "disk", source)
    os.close(held)


def test_old_copies_are_removed_unless_a_job_uses_them(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another source")
    kept = _copy(tmp_path / "disk", other)
    first = _copy(tmp_path / "disk", source)
    held = hold(str(first))
    interrupted = _interrupted(tmp_path / "disk", source, 1).folder.parent
    (source / "a").write_bytes(b"1")
    second = _copy(tmp_path / "disk", source)
    assert first.exists()
    os.close(held)
    (source / "a").write_bytes(b"2")
    third = _copy(tmp_path / "disk", source)
    assert [path.exists() for path in (kept, first, second, third)] == [True, False, False, True]
    assert len([*interrupted.iterdir()]) == 2
    _interrupted(tmp_path / "disk", source, 1)  # with a complete copy, it is of no use
    assert _copy(tmp_path / "disk", source) == third
    assert len([*interrupted.iterdir()]) == 2


def test_copy_that_is_gone_cannot_be_held(tmp_path: Path) -> None:
    with pytest.raises(CopyError, match="is not there any more"):
        hold(str(tmp_path / "key" / "files" / "data"))


def test_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("disk", "link"):
        with pytest.raises(CopyError, match=r"is not a folder that only this user can write"):
            Copies(str(tmp_path / name))
    with pytest.raises(CopyError, match=re.escape("cannot be created: No such file or directory")):
        Copies(str(tmp_path / "missing" / "disk"))


def test_new_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    Copies(str(tmp_path / "disk"))
    assert stat.S_IMODE((tmp_path / "disk").stat().st_mode) == 0o700


def test_full_disk_is_an_error(source: Path, tmp_path: Path) -> None:
    manifest = scan(str(source))
    draft = Copies(str(tmp_path / "disk")).begin(manifest)
    first, second, _ = read_blocks(str(source), manifest)
    draft.write(first)
    with largest_file(BLOCK_BYTES), pytest.raises(OSError, match="File too large"):
        draft.write(second)
    assert draft.blocks == 1


def test_systems_without_a_boot_id_use_copies(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BOOT_ID", tmp_path / "absent")  # not Linux
    copy = _copy(tmp_path / "disk", source)
    assert is_whole(copy.parents[1])
