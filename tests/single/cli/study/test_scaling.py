"""`lockstep study scaling`: the tables that it prints."""

from __future__ import annotations

import pytest
from scaling_jobs import record

from lockstep.cli.study.scaling import _show


def test_a_part_that_is_not_measured_with_all_counts_is_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    seconds = {"low": 0.001, "median": 0.002, "high": 0.1}
    splits = {1: {"backward": 0.0015, "communication_exposed": 0.0}, 2: {"backward": 0.012}}  # as with PowerSGD
    records = [record(count, 90.0, step_seconds=seconds, split_seconds=split) for count, split in splits.items()]
    _show(records, {count: {"nodes": 1, "threads": 4} for count in splits}, 0.75)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "1", "4", "90", "90", "to", "90", "1.00", "50", "%", "*"] in rows
    assert ["1", "2.00", "1.00–100", "1.50", "0.00"] in rows
    assert ["2", "2.00", "1.00–100", "12.0", "-"] in rows
