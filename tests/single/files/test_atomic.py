"""Files written whole or not at all, untrusted files, and lists of checkpoints."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import tracemalloc
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config.run_paths import all_in, complete, newest
from lockstep.errors import printable
from lockstep.files.atomic import partial_of, replacing, sync
from lockstep.files.untrusted import parse_json, parse_yaml, read_bytes


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "weights.pt2"
    path.write_text("before")
    with replacing(path, durable=durable) as partial:
        assert partial.suffix == ".pt2"
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == [path.name]


def test_a_durable_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced, opened = tmp_path / "file", list[tuple[int, bool]](), psutil.Process().num_fds()
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append((os.fstat(opened).st_ino, path.exists())))
    with replacing(path, durable=True) as partial:
        partial.write_text("content")
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]
    assert psutil.Process().num_fds() == opened


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_after_an_error_all_is_as_it_was(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def write() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_kill_has_left_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    partial_of(path).write_text("a longer text of before")
    with replacing(path) as partial:
        partial.write_text("new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"file": "new"}


def test_a_shared_file_is_written_beside_that_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, shared=True) as partial:
        assert str(os.getpid()) in partial.name
        partial_of(path).write_text("another's")
        partial.write_text("own")
    assert path.read_text() == "own"


def test_folder_removed_during_the_write_hides_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> None:
        with replacing(folder / "file"):
            folder.rmdir()
            raise ValueError("the first error")

    with pytest.raises(ValueError, match="first"):
        write()


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.EINVAL, nullcontext()), (errno.ENOTSUP, nullcontext()), (errno.EIO, pytest.raises(OSError, match="I/O"))],
)
def test_file_system_that_cannot_sync_folders_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: AbstractContextManager[Any]
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, "I/O")

    monkeypatch.setattr(os, "fsync", refuse)
    with outcome:
        sync(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_existing_temporary_name_is_not_followed_or_waited_for(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    partial = partial_of(tmp_path / "config")
    if kind == "link":
        partial.symlink_to(other)
    else:
        os.mkfifo(partial)
    with replacing(tmp_path / "config") as path:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
        os.write(descriptor, b"new")
        os.close(descriptor)
    assert (tmp_path / "config").read_text() == "new"
    assert other.read_text() == "mine"


PAIRS = [*itertools.pairwise("abcdefghijklmnopqrstu")]
BILLION = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in PAIRS)
MERGED = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in PAIRS)


@pytest.mark.parametrize(
    "text",
    [
        *(BILLION, MERGED, "a: &a [*a]", "[" * 5000, "a: " + "{a: " * 5000, "x" * (1 << 21), "\x00", b"\xff\xfe\xff"),
        *("!!python/object/apply:os.system ['touch owned']", "2001-99-99", "? {a: 1}\n: 2", "!!int x", "%YAML 9.9\n"),
        *("!!timestamp x", "1" * 5000, "!!float x", "a: b: c", "1" + ":00" * 80_000, "!!int [1]"),
        *("0x" + "f" * 10_000, "-0x1ffffffffffffffff", "1:00:00:00:00:00:00:00:00:00:00:00:00", "0b" + "1" * 66),
    ],
)
def test_invalid_or_endless_yaml_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_yaml(text)


def test_yaml_integers_of_64_bits_are_read_in_all_forms() -> None:
    text = f"[0xffff_ffff_ffff_ffff, -{1 << 64}, 1:00:00, 0b{'1' * 64}, 0o17, 017]"
    assert parse_yaml(text) == [(1 << 64) - 1, -(1 << 64), 3600, (1 << 64) - 1, "0o17", 15]


def test_yaml_with_aliases_of_usual_size_is_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a\n") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": {"x": 1},
    }


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "", b"\xff", "{", "9" * 400, '{"a": [-' + "1" * 21 + "]}"]
)
def test_invalid_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_json_of_usual_size_is_read() -> None:
    assert parse_json(b'{"a": [18446744073709551615, -9223372036854775808, 1e400, "k\xc3\xa4"]}') == {
        "a": [(1 << 64) - 1, -(1 << 63), math.inf, "kä"]
    }
    assert len(parse_json(json.dumps(["tench, Tinca tinca"] * 900_000, indent=2))) == 900_000


def test_json_of_too_many_values_takes_no_memory() -> None:
    text = "[" + "[]," * 3_000_000 + "[]]"
    tracemalloc.start()
    try:
        for each in (text, text.encode()):
            with pytest.raises(ValueError, match="more than 2,000,000 values"):
                parse_json(each)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(text)


def test_only_plain_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    assert read_bytes(tmp_path / "file", 4) == b"four"
    os.mkfifo(tmp_path / "pipe")
    for path, most in ((tmp_path / "file", 3), (tmp_path / "pipe", 9), (Path("/dev/zero"), 9)):
        with pytest.raises(ValueError, match=r"more than|not a regular file"):
            read_bytes(path, most)


def test_what_steers_a_terminal_is_written_out() -> None:
    assert printable("kä\tfer\n \x1b]0;x\x07\u202e") == "kä\tfer\n \\x1b]0;x\\x07\\u202e"


def test_checkpoints_are_sorted_by_step_and_other_names_skipped(tmp_path: Path) -> None:
    for name in ("step-99999999", "step-100000000", "step-00000005", "step-x", "step-", ".partial-step-00000006"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step-200000000").mkdir()  # its manifest is lost
    (tmp_path / "step-00000007").touch()
    names = ["step-00000005", "step-99999999", "step-100000000"]
    assert [path.name for path in complete(tmp_path)] == names
    assert [path.name for path in all_in(tmp_path)] == [*names, "step-200000000"]
    assert newest(tmp_path) == tmp_path / names[-1]
    assert newest(tmp_path / "missing") is None
