"""`lockstep study scaling`: the tables that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scaling_jobs import record

from lockstep.cli import main
from lockstep.cli.study.scaling import show_scaling
from lockstep.study.step_jobs import figures_of


def _program(workers: int, samples: float | None = None) -> dict[str, Any]:
    """Return the record of a program with steps of 0.1 s, whose workers each take so many samples."""
    figures = {"steps_per_second": 10.0, "samples_per_second": samples and 10.0 * samples, "phase_seconds": {}}
    figures |= {"step_seconds": {"low": 0.1, "median": 0.1, "high": 0.1}, "waits": [], "program": {}, "exchanges": 30}
    figures |= {"measured_steps": 30, "backward_passes_per_step": 1.0, "peak_memory_bytes": 1, "memory": "resident"}
    figures |= {"device": "cpu", "connected": True}
    figures |= dict.fromkeys(("utilization", "memory_limit_bytes", "gpu", "environment"))
    about = {"kind": "scaling", "modes": ["weak"], "workers": workers, "repeat": 0, "job": "01234567", "steps": 30}
    return {**about, "label": "train.py", **figures_of([figures] * workers, workers)}


@pytest.mark.parametrize(("samples", "unit"), [(None, "worker-steps/s"), (64.0, "samples/s")])
def test_constant_steps_of_weak_scaling_have_an_efficiency_of_1(
    samples: float | None,
    unit: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    records = [_program(workers, samples) for workers in (1, 2, 3)]
    (series,) = show_scaling(records, {workers: {"nodes": 1, "threads": 1} for workers in (1, 2, 3)}, 0.75)
    name = unit.replace("-", "_").replace("/s", "_per_second")
    rate = samples or 1.0
    assert [(row["workers"], row[name], row[f"min_{name}"], row["speedup"]) for row in series["rows"]] == [
        (workers, pytest.approx(10 * rate * workers), pytest.approx(10 * rate * workers), pytest.approx(workers))
        for workers in (1, 2, 3)
    ]
    assert series["rows"][0] | {"efficiency": 1.0, "nodes": 1, "threads": 1} == series["rows"][0]
    table = capsys.readouterr().out
    assert unit in table
    assert "The efficiency is at least 75 % up to 3 workers." in table
    assert "The efficiency is at least 75 % up to 3 workers." in series["verdict"]
    for workers in (1, 2, 3):
        assert [f"{workers}.00", "100", "%"] in [line.split()[-3:] for line in table.splitlines()]
    file = tmp_path / "scaling.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["study", "predict", str(file), "--np", "6"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {row[0]: float(row[-1]) for row in rows if row and row[0].isdecimal()} == dict.fromkeys("1236", 1.0)
    assert main(["report", str(file), "-o", str(tmp_path / "report")]) == 0
    (path,) = (tmp_path / "report" / "tables").glob("scaling-weak-throughput-*points.csv")
    heading, *lines = [line.split(",") for line in path.read_text().splitlines()]
    shares = [float(line[heading.index("efficiency (%)")]) for line in lines]
    assert shares == pytest.approx([100.0, 100.0, 100.0])


def test_points_in_different_units_are_not_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    show_scaling([_program(1, 64.0), _program(2)], {workers: {"nodes": 1, "threads": 1} for workers in (1, 2)}, 0.75)
    printed = capsys.readouterr().out
    assert printed.count("100 %") == 2
    assert "The efficiency" not in printed


def test_a_part_that_is_not_measured_with_all_counts_is_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    seconds = {"low": 0.001, "median": 0.002, "high": 0.1}
    splits = {1: {"backward": 0.0015, "communication_exposed": 0.0}, 2: {"backward": 0.012}}  # as with PowerSGD
    records = [record(count, 90.0, step_seconds=seconds, split_seconds=split) for count, split in splits.items()]
    (series,) = show_scaling(records, {count: {"nodes": 1, "threads": 4} for count in splits}, 0.75)
    first, last = series["rows"]
    assert (first["split_seconds"], last["split_seconds"], last["step_seconds"]) == (splits[1], splits[2], seconds)
    assert (last["efficiency"], last["mean_step_seconds"], last["joules_per_image"]) == (0.5, 0.012, None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "1", "4", "90", "90", "to", "90", "1.00", "50", "%", "*"] in rows
    assert ["1", "1.00–100", "1.50", "1.50", "0.00"] in rows
    assert ["2", "1.00–100", "12.0", "12.0", "-"] in rows
