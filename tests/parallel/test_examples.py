"""The examples run as their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def _accuracy(command: list[str], cwd: Path) -> float:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    (accuracy, *_) = re.findall(r"([\d.]+) % of \d+ images right", done.stdout)  # both workers may say it, at once
    return float(accuracy)


@pytest.mark.parametrize("name", ["fit.py", "own_loop.py"])
def test_it_runs_on_two_workers(name: str, tmp_path: Path) -> None:
    assert _accuracy([*TORCHRUN, str(EXAMPLES / name)], tmp_path) > 90


def test_fit_is_short_and_runs_alone(tmp_path: Path) -> None:
    assert len((EXAMPLES / "fit.py").read_text().splitlines()) < 30
    assert _accuracy([sys.executable, str(EXAMPLES / "fit.py")], tmp_path) > 90
