"""`lockstep compare`: what it prints, its exit codes, and sides that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.files.jsonl import RecordWriter


def _write(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    return path.parent if path.name == "metrics.jsonl" else path


def _observed(folder: Path, forward: float = 3e-3, batch: int = 32, start: float = 0.0, steps: int = 9) -> Path:
    """Write the records of an observed program, whose steps alternate between two slightly different times."""
    program = f"python train.py --batch-size {batch}"
    records: list[dict[str, Any]] = [{"kind": "run", "step": 0, "time_seconds": 0.0, "workers": 1, "program": program}]
    for number in range(steps):
        phases = {"forward": forward, "backward": 5e-3 * (1 + 0.002 * (number % 2)), "optimizer": 2e-3}
        rate = 1 / sum(phases.values())
        spread = {name: dict.fromkeys(("min", "median", "max"), time) for name, time in phases.items()}
        place = {"kind": "step", "step": 100 * number, "time_seconds": float(number), "unix_time": start + number}
        rates = {"steps_per_second": rate, "images_per_second": rate * batch}
        records.append({**place, **rates, "phase_spread": spread})
    return _write(folder / "metrics.jsonl", *records)


def _study(path: Path, times: dict[int, float], repeats: int = 3, **changes: Any) -> Path:
    """Write the records of a study, by number of workers the seconds of a step."""
    study = {
        "kind": "scaling",
        "modes": ["weak"],
        "label": "train.py",
        "environment": {"packages": {"torch": "2.15.0"}},
    }
    records = [
        {
            **study,
            "workers": workers,
            "repeat": repeat,
            "unix_time": repeat,
            "steps_per_second": (1 + repeat / 1000) / seconds,
            "samples_per_second": 32 * workers * (1 + repeat / 1000) / seconds,
            "split_seconds": {"forward": seconds - 7e-3, "backward": 5e-3, "optimizer": 2e-3},
            **changes,
        }
        for repeat in range(repeats)
        for workers, seconds in times.items()
    ]
    return _write(path, *records)


def test_a_slower_run_is_named_with_its_part_and_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _observed(tmp_path / "a"), _observed(tmp_path / "b", forward=3.5e-3, batch=64)
    assert main(["compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unclear: B took 48 % less time per sample")  # twice the samples in 1.05 of the time
    assert lines[1] == "A 3,198 and B 6,092 samples/s, not measured in turn"
    assert lines[2].split() == ["µs", "per", "sample", "A", "B", "B", "-", "A"]
    assert lines[3].split() == ["forward", "93.7", "54.7", "-39.1"]
    assert lines[-1] == "  program: python train.py --batch-size 32 -> python train.py --batch-size 64"
    again = _observed(tmp_path / "c", forward=3.5e-3)
    assert main(["compare", str(a), str(again)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("B is slower: 5.0 % more time per step (+")
    assert lines[0].endswith(", mostly in forward")
    assert lines[1] == "A 99.95 and B 95.19 steps/s, not measured in turn"
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:7]}
    assert rows == {
        "forward": ["3", "3.5", "+0.5"],
        "backward": ["5", "5", "+0"],
        "optimizer": ["2", "2", "+0"],
        "all": ["10", "10.5", "+0.5"],
    }
    assert lines[-1] == "no recorded setting or version differs"


@pytest.mark.parametrize(
    ("limit", "forward", "code"),
    [("3%", 3e-3, 0), ("3", 3.5e-3, 11), ("5%", 3.5e-3, 12), ("6%", 3.5e-3, 0), ("0%", 2.5e-3, 0)],
)
def test_a_limit_has_three_exit_codes(limit: str, forward: float, code: int, tmp_path: Path) -> None:
    a, b = _observed(tmp_path / "a"), _observed(tmp_path / "b", forward)
    assert main(["compare", str(a), str(b), "--max-slowdown", limit]) == code


def test_sessions_with_the_same_workers_are_one_run(tmp_path: Path) -> None:
    a, b = _observed(tmp_path / "a"), _observed(tmp_path / "b", 3.5e-3)
    writer = RecordWriter(b / "metrics.jsonl")
    writer.write({"kind": "run", "step": 800, "time_seconds": 8.0, "workers": 1, "program": "train.py"})
    writer.close()
    renamed = (b / "metrics.jsonl").rename(tmp_path / "b.jsonl")
    assert main(["compare", str(a), str(renamed), "--max-slowdown", "3%"]) == 11


def test_runs_in_turn_are_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        _observed(tmp_path / f"a/{number}", start=100 * number)
        _observed(tmp_path / f"b/{number}", 3.1e-3, start=100 * number + 50)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = printed["results"][""]
    assert (found["verdict"], found["alternate"]) == ("slower", True)
    assert found["measured"][1] == pytest.approx(0.01, rel=0.01)
    assert printed["differing"] == {}


def test_studies_are_compared_where_both_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _study(tmp_path / "a.jsonl", {1: 0.010, 2: 0.010, 4: 0.010})
    b = _study(tmp_path / "b.jsonl", {2: 0.010, 4: 0.012, 8: 0.012}, environment={"packages": {"torch": "2.14.0"}})
    assert main(["compare", str(a), str(b), "--max-slowdown", "5%"]) == 11
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(":")] == [
        "2 workers, weak scaling:",
        "4 workers, weak scaling:",
        "what differs:",
    ]
    assert any(line.startswith("no difference above 0.") for line in lines)
    assert any(line.startswith("B is slower: 20 % more time per step") for line in lines)
    assert lines[-1] == "  torch: 2.15.0 -> 2.14.0"


def test_what_only_one_study_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B may lack it because its job failed, so a limit is not kept for sure."""
    large = _study(tmp_path / "a.jsonl", {1: 0.010, 2: 0.010, 4: 0.010})
    small = _study(tmp_path / "b.jsonl", {1: 0.010, 2: 0.010})
    for a, b, side, code in ((large, small, "A", 12), (small, large, "B", 0)):
        assert main(["compare", str(a), str(b), "--max-slowdown", "5%"]) == code
        assert f"only in {side}, so not compared: 4 workers, weak scaling" in capsys.readouterr().out.splitlines()


def test_records_without_parts_and_steps_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"kind": "scaling", "modes": ["weak"], "workers": 1, "label": "GPT-2"}
    for name in "ab":
        rows = [{**record, "tokens_per_second": 31200 + number, "unix_time": number} for number in range(3)]
        _write(tmp_path / f"{name}.jsonl", *rows)
    assert main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("no difference above 0.0 % in the time per step")


def test_sides_that_cannot_be_compared_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, study = _observed(tmp_path / "run"), _study(tmp_path / "study.jsonl", {1: 0.01})
    other = _study(tmp_path / "other.jsonl", {2: 0.01})
    empty = _write(tmp_path / "empty/metrics.jsonl", {"kind": "run", "step": 0, "program": "train.py"})
    _study(tmp_path / "both.jsonl", {1: 0.01})
    both = _study(tmp_path / "both.jsonl", {1: 0.01}, label="eval.py")
    start = {"kind": "run", "step": 0, "program": "train.py", "workers": 2}
    _observed(tmp_path / "mixed/1")
    _write(tmp_path / "mixed/2/metrics.jsonl", start)
    for paths, text in (
        ([run, tmp_path / "missing"], "missing does not exist"),
        ([run, study], "compare two runs with records of steps"),
        ([run, empty], "nothing to compare in "),
        ([study, other], "with the same -np and --mode"),
        ([study, both], "one side has weak scaling of several jobs (label: train.py and eval.py)"),
        ([run, tmp_path / "mixed"], "one side has runs of several jobs (workers: 1 and 2)"),
        ([run], "missing B"),
        ([run, run, "--max-slowdown", "much"], "--max-slowdown much: must be a percentage, such as 3%"),
        ([run, run, "--max-slowdown", "nan"], "--max-slowdown nan: must be a percentage, such as 3%"),
    ):
        assert main(["compare", *map(str, paths)]) == 2
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


def test_runs_of_one_record_have_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (_observed(tmp_path / name, steps=1) for name in "ab")
    assert main(["compare", str(a), str(b), "--max-slowdown", "3%"]) == 12
    assert capsys.readouterr().out.startswith("too few records to say; run A and B in turn")
