"""`lockstep study predict`: what a user types, and sees."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main

PUBLISHED = Path(__file__).parents[4] / "examples" / "studies" / "published.jsonl"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def _write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _point(workers: int, images_per_second: object, **more: Any) -> dict[str, Any]:
    fields = {"kind": "scaling", "modes": ["weak"], "workers": workers, "repeat": 0, "job": "1234", "arch": "resnet18"}
    return {**fields, "images_per_second": images_per_second, **more}


def test_a_fit_to_some_points_shows_its_errors_at_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "predict", str(PUBLISHED), "--from", "4,8,16", "--np", "256"]) == 0
    out = capsys.readouterr().out
    for part in ("resnet50 on imagenet, V100 (weak scaling", "measured trainings/s", "fitted terms (s per training): "):
        assert part in out
    lines = out.splitlines()
    (row,) = (line for line in lines if "37,488" in line)
    cells = [cell.strip() for cell in row.split("│")]
    assert cells == ["64", "37,488", "40,236", "34,689 to 46,670", "+7.3 %", "0.80"]
    (row, *_) = (line for line in lines if line.strip().startswith("256"))
    assert [cell.strip() for cell in row.split("│")][1] == ""
    assert "- fitted only to 4, 8 and 16 workers; the other points are for checking" in lines


def test_json_has_the_rows_of_the_table_and_its_notes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "predict", "--json", str(PUBLISHED), "--from", "4,8,16", "--np", "256"]) == 0
    printed = capfd.readouterr()
    series = next(each for each in json.loads(printed.out)["series"] if each["label"].endswith("V100"))
    measured, predicted = (next(row for row in series["rows"] if row["workers"] == size) for size in (64, 256))
    expected = {"images_per_second": 40_236, "low_images_per_second": 34_689, "high_images_per_second": 46_670}
    expected |= {"workers": 64, "measured_images_per_second": 37_488, "error": 0.073, "efficiency": 0.80}
    assert measured == pytest.approx(expected, rel=0.01)
    assert predicted["measured_images_per_second"] is predicted["error"] is None
    assert all(f"- {line}" in printed.err for line in series["verdict"])


def test_the_study_s_own_file_and_larger_counts_are_the_default(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {1: (100, 102, 98), 2: (195, 190, 200), 4: (380, 384, 376)}
    points = [_point(n, rate, repeat=repeat) for n, some in rates.items() for repeat, rate in enumerate(some)]
    _write(here / "study" / "scaling.jsonl", points)
    assert main(["study", "predict"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"(?m)^ *(\d+) │", out) == ["1", "2", "4", "8", "16", "32"]
    assert "195 (192.5 to 197.5)" in out


def test_labels_and_units_are_printed_as_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {"kind": "scaling", "modes": ["weak"], "label": "GPT [/small]"}
    points = [{**written, "workers": workers, "batches_per_second": workers} for workers in (1, 2, 4)]
    assert main(["study", "predict", str(_write(here / "s.jsonl", points))]) == 0
    printed = capsys.readouterr().out
    assert "GPT [/small] (weak scaling)" in printed
    assert "batches/s" in printed
    assert "s per batch and worker" in printed


def test_damaged_records_are_named_and_the_rest_is_fitted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [_point(1, 100), _point(2, 195), _point(0, 5), _point(4, "fast"), _point(8, 0), _point(1, 9, job="alone")]
    points += [_point(16, 1500)]
    file = _write(here / "s.jsonl", points)
    assert main(["study", "predict", str(file), "--np", "4"]) == 0
    said = capsys.readouterr()
    assert said.err.count("warning: skipped scaling record") == 3
    assert (
        "not fitted: resnet18, job alone, weak scaling: a fit needs at least 3 numbers of workers, got only 1"
        in said.err
    )
    assert "Traceback" not in said.err
    assert "1,500" in said.out


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        ([], 2, "study/scaling.jsonl does not exist; create it with `lockstep study scaling`"),
        (["nothing.jsonl"], 2, "nothing.jsonl does not exist"),
        (["."], 2, ". cannot be read: Is a directory"),
        (["other.jsonl"], 4, "other.jsonl has no scaling records"),
    ],
)
def test_unsuitable_files_are_reported_in_one_line(
    words: list[str], code: int, hint: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(here / "other.jsonl", [{"kind": "loading"}])
    assert main(["study", "predict", *words]) == code
    said = capsys.readouterr()
    assert hint in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_counts_that_no_series_has_are_reported_individually(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "predict", str(PUBLISHED), "--from", "3,5"]) == 4
    error = capsys.readouterr().err
    assert error.count("no measurements with 3 and 5 workers; measured numbers of workers:") == 3
    assert "no series can be fitted" in error
