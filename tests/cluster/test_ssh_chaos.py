"""A few rounds of chaos.py, so that it keeps working; `python tests/support/chaos.py` plays many."""

from __future__ import annotations

import random
from pathlib import Path

import chaos
import pytest
from hosts import Bed

pytestmark = pytest.mark.cold  # on hosts of their own


@pytest.mark.parametrize(
    ("job", "part", "at_start"),
    [("raw", "worker", False), ("raw", "link", False), ("images", "loader", False), ("raw", "launcher", True)],
)
def test_job_ends_in_time_without_leftovers_whatever_is_killed(
    bed: Bed, tmp_path: Path, job: str, part: str, at_start: bool
) -> None:
    this = chaos.Round(1, job, part, at_start, patience=3.0)
    chaos.play(bed, tmp_path / "job", this, random.Random(0))
    assert this.breaches == [], this.row()
