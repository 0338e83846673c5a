"""`lockstep explain`, and the same lines at the end of an observed job: what users see."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.cli.observed_job import MIN_RECORDS, advice
from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.files.jsonl import RecordWriter

FACTS = ProgramFacts(40_000_000, 4, 60, "ddp", 1, 2, 1, 0, 0.0, "cpu")


def _records(reduction: float = 0.4, count: int = MIN_RECORDS, last: float = 0.0) -> list[dict[str, Any]]:
    """Return the records of two workers on two hosts; `last`: what the second half of the steps takes longer."""
    start = {"kind": "run", "step": 0, "time_seconds": 0.0, "workers": 2, "hosts": 2, "program": "python train.py"}
    phases = [
        {"forward": [0.04] * 2, "backward": [0.1 + last * (2 * number > count)] * 2, "reduction": [reduction] * 2}
        for number in range(1, count + 1)
    ]
    at = [{"step": 10 * number, "time_seconds": float(number)} for number in range(1, count + 1)]
    steps = [{"kind": "step", **where, "phase_seconds": each} for where, each in zip(at, phases, strict=True)]
    return [start, *steps, {"kind": "program", **at[-1], **asdict(FACTS), "transfer_seconds": reduction}]


def _write(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    writer = RecordWriter(folder / "metrics.jsonl")
    for record in records:
        writer.write(record)
    writer.close()
    return folder


def test_a_verdict_is_printed_with_its_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path / "steps", _records())
    assert main(["explain", str(folder)]) == 0
    name, verdict, *changes = capsys.readouterr().out.splitlines()
    assert name == "steps:"
    assert verdict.startswith(
        "a slow link bounds the step: 400 ms of 540 ms (74 %) for the exchange, 40 MB at 800 Mbit/s"
    )
    assert [each[:5] for each in changes] == ["  1. ", "  2. "]
    assert main(["explain", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["bound"], found["changes"][0]["kind"]) == ("steps", "slow link", "powersgd")


@pytest.mark.parametrize("words", [["none"], ["short"]])
def test_records_without_times_are_refused(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(here / "short", _records()[:1])
    assert main(["explain", *words]) == 2
    assert "lockstep explain: error: " in capsys.readouterr().err


def test_a_job_ends_with_advice_only_if_much_can_be_saved() -> None:
    assert len(advice(_records())) == 3
    assert advice(_records(reduction=0.009)) == []
    assert advice(_records(count=MIN_RECORDS - 1)) == []
    assert advice(_records(last=0.5)) == []  # too noisy
    assert advice([]) == []
