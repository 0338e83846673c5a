"""Hostile files are refused by name: in short for every parser; `run.py --inputs 10000` is the long form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


def _fuzz(*words: str) -> None:
    command, environment = [sys.executable, str(RUN), *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_no_parser_of_outside_input_crashes_hangs_or_runs_anything() -> None:
    _fuzz("--together", "--inputs", "20")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_inputs_for_each() -> None:
    _fuzz("--inputs", "10000")
