"""Files that anybody may have written are read within bounds, and what is wrong with them is a ValueError."""

from __future__ import annotations

import itertools
import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest

from lockstep.files.untrusted import parse_json, parse_yaml, printable, read_bytes

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
