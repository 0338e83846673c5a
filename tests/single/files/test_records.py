"""Records in JSON lines: what is written, and what is read of damaged ones."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from lockstep.files.io_records import job_io, worker_file
from lockstep.files.jsonl import (
    RecordWriter,
    count,
    counts,
    keep_records,
    number,
    one_line,
    read_records,
    spread,
    whole,
    write_json,
)

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


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "metrics.jsonl")
    for written in (1, 2):
        writer.write(RECORDS[1])
        assert list(read_records(tmp_path / "metrics.jsonl")) == [RECORDS[1]] * written
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_lacks_becomes_null(tmp_path: Path, value: float) -> None:
    _write(tmp_path / "metrics.jsonl", [{"kind": "step", "loss": value, "step": 3}])
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"kind": "step", "loss": None, "step": 3}


@pytest.mark.parametrize(
    "rest", ['{"kind": "ste', "", "\n\n", "[1, 2]\n", "\x00\x00\x00", "7\n", '{"a":' * 100_000, '{"text": "\udce4']
)
def test_incomplete_records_are_skipped(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, RECORDS)
    with path.open("ab") as file:
        file.write(rest.encode("utf-8", "surrogateescape"))
    assert list(read_records(path)) == RECORDS


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


def _write_io(run: Path, rank: int, *samples: tuple[float, float, float], **more: float) -> None:
    """Records of (time of the end, seconds, bytes)."""
    path = worker_file(run, rank)
    path.parent.mkdir(exist_ok=True)
    writer = RecordWriter(path)
    for unix_time, seconds, amount in samples:
        record = {"kind": "io", "rank": rank, "unix_time": unix_time, "seconds": seconds, "read_bytes": amount}
        writer.write(record | more)
    writer.close()


def test_a_run_without_records_has_no_rows(tmp_path: Path) -> None:
    assert job_io(tmp_path) == []


def test_rates_of_workers_that_sample_at_other_moments_add_up(tmp_path: Path) -> None:
    _write_io(tmp_path, 0, *((end, 5, 500) for end in (105, 110, 115)))
    _write_io(tmp_path, 1, *((end, 5, 1000) for end in (107, 112, 117)))
    rows = job_io(tmp_path)
    assert [(row["unix_time"], row["seconds"]) for row in rows] == [(100, 5), (105, 5), (110, 5), (115, 2)]
    rates = [row["read_bytes_per_second"] for row in rows]
    assert rates == pytest.approx([100 + 200 * 3 / 5, 300, 300, 200])
    assert sum(row["seconds"] * row["read_bytes_per_second"] for row in rows) == pytest.approx(4500)


def test_a_resumed_run_has_a_gap_and_no_rows_in_it(tmp_path: Path) -> None:
    _write_io(tmp_path, 0, (105, 5, 500), (106, 1, 300))
    _write_io(tmp_path, 0, (1005, 5, 500))
    _write_io(tmp_path, 1, (1005, 5, 500))  # on more workers than before
    rows = job_io(tmp_path)
    assert [row["unix_time"] for row in rows] == [100, 105, 1000]
    assert [row["read_bytes_per_second"] for row in rows] == [100, 300, 200]


def test_width_can_be_chosen_and_a_half_written_line_is_skipped(tmp_path: Path) -> None:
    _write_io(tmp_path, 0, (105, 5, 500), (110, 5, 1500), node_disk_reads=10)
    with worker_file(tmp_path, 0).open("a") as file:
        file.write('{"kind": "io", "unix_ti')
    (row,) = job_io(tmp_path, 10)
    assert row == {"unix_time": 100, "seconds": 10, "read_bytes_per_second": 200, "node_disk_reads_per_second": 2}


def test_records_without_possible_numbers_are_reported(tmp_path: Path) -> None:
    _write_io(tmp_path, 0, (105, 5, 500), (110, 5, 10**400), (115, 1e12, 500), (1e300, 5, 500))
    with worker_file(tmp_path, 0).open("a") as file:
        for lacking in ('"unix_time": 110', '"unix_time": 110, "seconds": 5, "rank": 0, "read_bytes": null'):
            file.write(f'{{"kind": "io", {lacking}}}\n')
        file.write('{"kind": "oth')
    damaged: list[Path] = []
    (row,) = job_io(tmp_path, on_damage=damaged.append)
    assert row["read_bytes_per_second"] == 100
    assert damaged == [worker_file(tmp_path, 0)] * 6


@pytest.mark.parametrize("value", [None, True, "1", [1], math.nan, math.inf, 10**400, -(10**400), 1e300])
def test_invalid_or_absurd_number_gives_none(value: object) -> None:
    assert number({"a": {"b": value}}, "a", "b") is None
    assert whole({"a": value}, "a") is None
    assert count({"a": value}, "a") is None
    assert spread({"a": {"median": value}}, "a") is None


def test_numbers_are_ones_that_numpy_can_hold() -> None:
    assert isinstance(number({"a": 10**30}, "a"), float)
    assert whole({"a": 10**30}, "a") is None
    assert (whole({"a": 8.0}, "a"), whole({"a": 8.5}, "a")) == (8, None)
    assert (whole({"a": -3}, "a"), count({"a": -3}, "a"), count({"a": 0}, "a")) == (-3, None, 0)


@pytest.mark.parametrize(
    "value", [None, 3, "12", {}, [1, -1], [1.5], [True], [[1]], [10**400], [math.nan], [1, 2, 3, 4]]
)
def test_a_list_of_counts_is_whole_or_none(value: object) -> None:
    assert counts({"a": value}, "a", most=3) is None
    assert counts({"a": [2, 0, 1.0]}, "a", most=3) == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("naïve 図 ·", "naïve 図 ·"),
        ("a\x1b[2Jb\x9bc\x07", "a\ufffd[2Jb\ufffdc\ufffd"),
        ("a\nb\r\tc\u2028d", "a b  c d"),
        ("\u202eright to left", "\ufffdright to left"),
        ("bad name \udcff", "bad name \ufffd"),
        (7, ""),
        (None, ""),
    ],
)
def test_text_becomes_one_line_that_no_terminal_obeys(text: object, line: str) -> None:
    assert one_line(text) == line
