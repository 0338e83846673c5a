"""Repeated measurements and their record."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.study.figures import ComparisonTurn, Figure, ReadCounter, append_study, check_record_file, repeat
from lockstep.train.monitoring import io_sampling


def test_rates_are_medians_with_quartiles_of_the_repeats() -> None:
    figure = Figure("read", "files", [ComparisonTurn(2.0, images, 10 * images, 4) for images in (20, 40, 60, 80, 100)])
    assert figure.images_per_second == (20, 30, 40)
    assert figure.bytes_per_second.median == 300
    assert figure.operations_per_second == (2, 2, 2)
    assert Figure("x", "", [ComparisonTurn(1.0, 5, 0)]).images_per_second == (5, 5, 5)
    assert Figure("x", "", [ComparisonTurn(1.0, 5, 0)]).operations_per_second is None


def test_work_is_repeated_after_an_uncounted_warm_up() -> None:
    calls = 0

    def work() -> tuple[int, int]:
        nonlocal calls
        calls += 1
        time.sleep(0.2 if calls == 1 else 0.01)
        return 2, 100

    turns = repeat(work, 3, 0.05)
    assert len(turns) == 3
    assert sum(turn.images for turn in turns) == 2 * (calls - 1)
    assert all(50 * turn.images == turn.size_bytes for turn in turns)
    assert all(turn.seconds >= 0.05 for turn in turns)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count")
def test_read_calls_are_counted_without_those_of_counting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    counter = ReadCounter()
    assert counter.take()[0] == pytest.approx(0, abs=10)
    for _ in range(100):
        (tmp_path / "file").read_bytes()
    assert counter.take()[0] == pytest.approx(200, abs=10)


def test_a_system_that_does_not_count_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(io_sampling, "_read", refuse)
    assert ReadCounter().take() == (None, None)


def test_a_record_has_the_machine_but_no_name_of_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "loading.jsonl"
    check_record_file(path)
    for _ in range(2):
        append_study(path, {"kind": "loading"}, torch.device("cpu"))
    first, second = read_records(path)
    assert first["kind"] == second["kind"] == "loading"
    assert {"packages", "cores", "processor", "load_average", "threads_per_worker"} <= first["environment"].keys()
    assert not {"host", "folder", "command"} & first["environment"].keys()
    assert str(tmp_path) not in json.dumps(first)


def test_unwritable_file_is_reported_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        check_record_file(tmp_path / "file" / "loading.jsonl")
