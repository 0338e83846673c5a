"""Records: whole lines, read whatever a crash left."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from lockstep.files.jsonl import RecordWriter, keep_records, parse_record, read_records, write_json

RECORDS = [
    {"kind": "run", "step": 0, "name": "ünïcode \n line", "nested": {"a": [1, None, True]}},
    {"kind": "step", "step": 20, "loss": 0.1 + 0.2, "time_seconds": 1e-9},
    {"kind": "epoch", "step": 40, "top1": 0.5},
]


def _write(path: Path, records: list[dict[str, object]]) -> None:
    writer = RecordWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def test_records_come_back_as_they_were_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, RECORDS[:2])
    _write(path, RECORDS[2:])  # a second session appends
    assert list(read_records(path)) == RECORDS
    assert len(path.read_text().splitlines()) == 3


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "metrics.jsonl")
    for count in (1, 2):
        writer.write(RECORDS[1])
        assert list(read_records(tmp_path / "metrics.jsonl")) == [RECORDS[1]] * count
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_lacks_becomes_null(tmp_path: Path, value: float) -> None:
    _write(tmp_path / "metrics.jsonl", [{"kind": "step", "loss": value, "step": 3}])
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"kind": "step", "loss": None, "step": 3}


@pytest.mark.parametrize("rest", ['{"kind": "ste', "", "\n\n", "[1, 2]\n", "\x00\x00\x00", '{"text": "\udce4'])
def test_incomplete_records_are_skipped(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, RECORDS)
    with path.open("ab") as file:
        file.write(rest.encode("utf-8", "surrogateescape"))
    assert list(read_records(path)) == RECORDS


@pytest.mark.parametrize(
    "line", ["", "[1]", "7", '{"a": ', "[" * 100_000, '{"a":' * 100_000, b"\xff\xfe", b'{"a": "\xe4"}']
)
def test_only_a_whole_object_is_a_record(line: str | bytes) -> None:
    assert parse_record(line) is None
    assert parse_record('{"a": [1]}\n') == parse_record(b'{"a": [1]}\n') == {"a": [1]}


def test_damaged_lines_are_numbered_and_empty_ones_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n\n[1]\nbroken\n{"b": 2}\n{"half')
    damaged: list[int] = []
    assert list(read_records(path, damaged.append)) == [{"a": 1}, {"b": 2}]
    assert damaged == [3, 4, 6]


def test_after_a_crash_the_kept_records_can_be_added_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, RECORDS)
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 4')
    keep_records(path, lambda record: record["step"] <= 20)
    _write(path, RECORDS[2:])
    assert list(read_records(path)) == RECORDS
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_keeping_records_happens_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, RECORDS)
    with pytest.raises(KeyError):
        keep_records(path, lambda record: record["loss"] > 0)  # only some records have it
    assert list(read_records(path)) == RECORDS
    keep_records(tmp_path / "not there", lambda record: True)
    assert not (tmp_path / "not there").exists()


def test_json_replaces_the_file_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    write_json(path, {"torch": "2.11", "gpus": []})
    with pytest.raises(TypeError):
        write_json(path, {"torch": object()})
    assert json.loads(path.read_text()) == {"torch": "2.11", "gpus": []}
    write_json(path, {"other": 1})
    assert json.loads(path.read_text()) == {"other": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["environment.json"]


def test_a_pipe_that_nothing_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records")
    with pytest.raises(OSError, match="No such device or address"):
        RecordWriter(tmp_path / "records")
