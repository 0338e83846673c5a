"""The examples run as their docstrings say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from commands import TORCHRUN, Command, run

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.cold  # also how Python ends, with what they leave to it


def _accuracy(command: Command, cwd: Path) -> float:
    done = run(command, cwd, cold=True)
    assert done.returncode == 0, done.stderr
    (accuracy, *_) = re.findall(r"([\d.]+) % of \d+ images right", done.stdout)  # both workers may say it, at once
    return float(accuracy)


@pytest.mark.parametrize("name", ["fit.py", "own_loop.py"])
def test_it_runs_on_two_workers(name: str, tmp_path: Path) -> None:
    assert _accuracy([*TORCHRUN, EXAMPLES / name], tmp_path) > 90


def test_fit_is_short_and_runs_alone(tmp_path: Path) -> None:
    assert len((EXAMPLES / "fit.py").read_text().splitlines()) < 30
    assert _accuracy([sys.executable, EXAMPLES / "fit.py"], tmp_path) > 90
