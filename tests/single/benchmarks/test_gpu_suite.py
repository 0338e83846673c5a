"""The parts of the GPU suite: what they say about themselves, and their limits."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path

import pytest
from commands import run
from gpu import suite
from gpu.__main__ import PARTS

SUITE = Path(__file__).parents[3] / "benchmarks" / "gpu"


def test_list_shows_minutes_and_what_needs_cuda(tmp_path: Path) -> None:
    done = run([sys.executable, SUITE, "list"], tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in lines[::2]] == [*PARTS]
    assert all(re.match(r"\w+ +[1-9] min  ", line) for line in lines[::2])
    assert all("without CUDA: all at small sizes" in line for line in lines[1::2])
    assert "except compiled networks" in lines[3]


@pytest.mark.parametrize(("whole", "reserved", "most"), [(3600.0, 0.0, 540.0), (540.0, 150.0, 390.0)])
def test_part_ends_after_nine_minutes_or_before_later_parts(whole: float, reserved: float, most: float) -> None:
    tested = suite.Suite(whole)
    tested.begin_part(reserved)
    assert 0.9 * most < tested.left() <= most


def test_step_ends_within_its_time() -> None:
    """A step that ignores SIGTERM is killed; the wait for that is part of its time."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited
    try:
        assert suite.run_until(["sleep", "1000"], 0.6, stop_seconds=0.5) == (-signal.SIGKILL, True)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_steps_without_time_are_left_out() -> None:
    tested = suite.Suite(60.0)
    tested.begin_part(reserved=30.0)
    for part in PARTS.values():
        part.run(tested, argparse.Namespace(data=Path(), only=[]))
    assert {outcome.code for outcome in tested.outcomes} == {None}
