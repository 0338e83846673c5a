"""The records of a job whose steps are observed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.cli.observed_job import run_observed
from lockstep.files.jsonl import read_records
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
