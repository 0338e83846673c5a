"""The job's I/O over time, merged from its workers' records."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.files.io_records import job_io, worker_file
from lockstep.files.jsonl import RecordWriter


def _write(run: Path, rank: int, *samples: tuple[float, float, float], **more: float) -> None:
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
    _write(tmp_path, 0, *((end, 5, 500) for end in (105, 110, 115)))
    _write(tmp_path, 1, *((end, 5, 1000) for end in (107, 112, 117)))
    rows = job_io(tmp_path)
    assert [(row["unix_time"], row["seconds"]) for row in rows] == [(100, 5), (105, 5), (110, 5), (115, 2)]
    rates = [row["read_bytes_per_second"] for row in rows]
    assert rates == pytest.approx([100 + 200 * 3 / 5, 300, 300, 200])
    assert sum(row["seconds"] * row["read_bytes_per_second"] for row in rows) == pytest.approx(4500)


def test_a_resumed_run_has_a_gap_and_no_rows_in_it(tmp_path: Path) -> None:
    _write(tmp_path, 0, (105, 5, 500), (106, 1, 300))
    _write(tmp_path, 0, (1005, 5, 500))
    _write(tmp_path, 1, (1005, 5, 500))  # on more workers than before
    rows = job_io(tmp_path)
    assert [row["unix_time"] for row in rows] == [100, 105, 1000]
    assert [row["read_bytes_per_second"] for row in rows] == [100, 300, 200]


def test_width_can_be_chosen_and_a_half_written_line_is_skipped(tmp_path: Path) -> None:
    _write(tmp_path, 0, (105, 5, 500), (110, 5, 1500), node_disk_reads=10)
    with worker_file(tmp_path, 0).open("a") as file:
        file.write('{"kind": "io", "unix_ti')
    (row,) = job_io(tmp_path, 10)
    assert row == {
        "unix_time": 100,
        "seconds": 10,
        "read_bytes_per_second": 200,
        "node_disk_reads_per_second": 2,
    }


def test_record_without_a_number_is_skipped_and_reported(tmp_path: Path) -> None:
    _write(tmp_path, 0, (105, 5, 500))
    with worker_file(tmp_path, 0).open("a") as file:
        for lacking in ('"unix_time": 110', '"unix_time": 110, "seconds": 5, "rank": 0, "read_bytes": null'):
            file.write(f'{{"kind": "io", {lacking}}}\n')
        file.write('{"kind": "oth')
    damaged: list[Path] = []
    (row,) = job_io(tmp_path, on_damage=damaged.append)
    assert row["read_bytes_per_second"] == 100
    assert damaged == [worker_file(tmp_path, 0)] * 3


def test_impossible_numbers_are_skipped_and_reported(tmp_path: Path) -> None:
    _write(tmp_path, 0, (105, 5, 500), (110, 5, 10**400), (115, 1e12, 500), (1e300, 5, 500))
    damaged: list[Path] = []
    (row,) = job_io(tmp_path, on_damage=damaged.append)
    assert row["read_bytes_per_second"] == 100
    assert damaged == [worker_file(tmp_path, 0)] * 3
