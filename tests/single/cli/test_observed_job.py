"""The records of a job whose steps are observed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.cli import observed_job
from lockstep.cli.observed_job import run_observed
from lockstep.diagnosis import OBSERVE
from lockstep.files.jsonl import read_records
from lockstep.launch.controller.job_outcome import JobEnd
from lockstep.observe.job_steps import JobSteps


@pytest.mark.parametrize("code", [0, 3, None])
def test_records_end_with_the_exit_code(tmp_path: Path, code: int | None) -> None:
    def run(own: Mapping[str, str], steps: JobSteps | None) -> int:
        assert steps
        steps.begin([""])
        if code is None:
            raise KeyboardInterrupt
        return code

    try:
        assert run_observed(("python", "train.py"), run, tmp_path / "steps") == code
    except KeyboardInterrupt:
        assert code is None
    last = list(read_records(tmp_path / "steps/metrics.jsonl"))[-1]
    assert (last["kind"], last["exit_code"]) == ("end", code)


def test_advice_that_fails_does_not_change_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(OBSERVE, raising=False)

    def run(own: Mapping[str, str], steps: JobSteps | None) -> int:
        assert steps
        steps.kept += [None] * observed_job.MIN_RECORDS  # type: ignore[list-item]
        return 0

    assert run_observed(("python", "train.py"), run) == 0
    assert "what bounds the steps is unknown: AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize("observes", [True, False])
def test_end_has_what_was_observed(observes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OBSERVE, raising=False)
    monkeypatch.setattr(observed_job, "advice", lambda records: ["waiting for data bounds the step"])

    def run(own: Mapping[str, str], steps: JobSteps | None) -> int:
        if steps:
            steps.stragglers.append({"ranks": (1,), "phase": "forward"})
            steps.findings.append("the weights differ")
        return 0

    end = JobEnd()
    run_observed(("python", "train.py"), run, observes=observes, end=end)
    found = [{"ranks": (1,), "phase": "forward"}], ["the weights differ"], ["waiting for data bounds the step"]
    assert (end.stragglers, end.findings, end.verdict) == (found if observes else (None, None, None))
