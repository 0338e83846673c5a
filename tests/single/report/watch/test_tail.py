"""Following a file that grows, breaks off, and is put another in the place of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.files.jsonl import keep_records
from lockstep.report.watch.run import FollowedFile

Write = Callable[..., None]


def test_each_record_is_read_once_as_soon_as_it_is_whole(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = FollowedFile(path)
    assert follower.read().records == []  # there is no file yet
    write(path, [{"step": 1}])
    assert follower.read() == ([{"step": 1}], True, 1.0)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert follower.read() == ([{"step": 2}], False, 1.0)
    assert follower.read().records == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert follower.read().records == [{"step": 3}]


def test_invalid_record_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo{"step": 3}\n\xff\xfe\n[4]\n5\n\n{"step": 6}\n')
    assert FollowedFile(path).read().records == [{"step": 1}, {"step": 6}]


def test_a_line_nested_too_deeply_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"[" * 100_000 + b'\n{"step": 6}\n')
    assert FollowedFile(path).read().records == [{"step": 1}, {"step": 6}]


def test_a_file_that_a_resume_rewrote_is_read_from_its_start(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(5)])
    follower = FollowedFile(path)
    follower.read()
    keep_records(path, lambda record: record["step"] < 3)
    write(path, [{"step": 3, "again": True, "longer": "than before " * 20}], "a")
    news = follower.read()
    assert news.is_new
    assert [record["step"] for record in news.records] == [0, 1, 2, 3]
    assert "again" in news.records[3]


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(5)])
    follower = FollowedFile(path)
    follower.read()
    with path.open("r+") as file:
        file.truncate(len('{"step": 0}\n'))
    assert follower.read() == ([{"step": 0}], True, 1.0)


def test_of_the_end_of_a_file_only_whole_records_are_read(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "io.jsonl"
    write(path, [{"number": number} for number in range(10, 90)])
    assert [record["number"] for record in FollowedFile(path, last_bytes=40).read().records] == [88, 89]


def test_a_long_file_comes_in_portions(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": step} for step in range(10, 40)])
    follower = FollowedFile(path)
    steps, shares = [], []
    for _ in range(10):
        news = follower.read(most_bytes=100)
        steps += [record["step"] for record in news.records]
        shares.append(news.share)
    assert steps == list(range(10, 40))
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.3
    assert shares[-1] == 1
