"""A worker's progress, as its host's node process reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.diagnosis.board import ANSWERS, HVD, NO_STEP, TRAINER, Board, BoardReader, boards_in


def test_what_a_worker_reports_is_read(tmp_path: Path) -> None:
    board = Board(tmp_path, 3)
    reader = BoardReader(board.path)
    first = reader.read()
    assert (first.pid, first.rank) == (os.getpid(), 3)
    assert (first.count, first.step, first.phase) == (0, NO_STEP, "starting")
    board.report("forward", 12)
    board.report("backward")
    board.set_sample(9, 8, 77)
    seen = reader.read()
    assert (seen.count, seen.step, seen.phase) == (2, 12, "backward")
    assert (seen.enqueued, seen.completed, seen.fingerprint) == (9, 8, 77)
    assert 0 <= seen.age_s < 60


def test_worker_is_judged_while_something_that_can_hang_reports(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    reader = BoardReader(board.path)
    board.set_flag(ANSWERS)
    assert not reader.read().is_judged
    board.set_flag(HVD)
    board.set_flag(TRAINER)
    assert reader.read().is_judged
    board.set_flag(TRAINER, False)
    assert reader.read().flags == HVD | ANSWERS


def test_a_question_is_answered_by_its_number(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    reader = BoardReader(board.path)
    assert reader.ask() == 1
    assert reader.ask() == 2
    assert board.question == 2
    assert reader.read().answer == 0
    board.answered(2)
    assert reader.read().answer == 2


def test_a_folders_boards_are_those_that_can_be_read_by_rank(tmp_path: Path) -> None:
    for rank in (2, 0):
        Board(tmp_path, rank)
    (tmp_path / "1-77.board").write_bytes(b"")
    (tmp_path / "1-78.board").write_bytes(bytes(128))
    (tmp_path / "1-79.answer").write_text("{}")
    assert [board.rank for board in boards_in(tmp_path)] == [0, 2]


def test_truncated_or_removed_board_shows_its_last_content(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    board.report("forward", 12)
    reader, own = BoardReader(board.path), board.reader()
    assert reader.read().step == 12
    os.truncate(board.path, 0)
    assert reader.read().step == 12
    assert not boards_in(tmp_path)
    os.truncate(board.path, 128)  # else this process would end at its next report, as the worker would
    board.path.unlink()
    assert reader.read().step == 12
    board.report("backward", 13)
    assert own.read().step == 13


def test_a_board_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0-1.board").write_bytes(bytes(128))
    with pytest.raises(ValueError, match="not a board of this version"):
        BoardReader(tmp_path / "0-1.board")
