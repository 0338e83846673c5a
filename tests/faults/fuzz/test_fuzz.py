"""Hostile files are refused by name: in short for every parser; `run.py --inputs 10000` is the long form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import own_environment, run

RUN = Path(__file__).parent / "run.py"


def _fuzz(folder: Path, seconds: float, *words: str) -> None:
    done = run([sys.executable, RUN, *words], folder, own_environment(OMP_NUM_THREADS="1"), seconds)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_parsers_of_outside_input_never_crash_hang_or_run_code(tmp_path: Path) -> None:
    _fuzz(tmp_path, 250, "--together", "--inputs", "20")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_inputs_for_each(tmp_path: Path) -> None:
    _fuzz(tmp_path, 7000, "--inputs", "10000")
