"""The example loop trains what `lockstep train` trains with the recipe for CIFAR-10: equal losses in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commands import LOCKSTEP, run
from tests.conftest import make_folder

from lockstep.files.jsonl import read_records

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_cifar.py"
MAX_LINES = 120


def _records(run_dir: Path) -> tuple[list[Any], list[Any]]:
    """Return the loss of each step, and the results of each evaluation."""
    records = list(read_records(run_dir / "metrics.jsonl"))
    evaluations = [each for each in records if each["kind"] == "epoch" and each.get("split") == "val"]
    return (
        [each["loss"] for each in records if each["kind"] == "step"],
        [figure for each in evaluations for figure in (each["loss"], each["top1"])],
    )


def test_the_loop_has_the_losses_of_the_command(tmp_path: Path) -> None:
    images = make_folder(tmp_path / "images", sizes=((32, 32),), train=3, val=1)
    options = ["--epochs", "2", "--batch-size", "2", "--log-every", "1", "--run-dir"]
    numbers = ["--precision", "fp64", "--device", "cpu"]
    train = [*LOCKSTEP, "train", images, "--config", "cifar10", "-np", "2", *numbers, *options, tmp_path / "command"]
    loop = [*LOCKSTEP, "run", "-np", "2", "--", sys.executable, EXAMPLE, images, "--fp64", *options, tmp_path / "loop"]
    for command in (train, loop):
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    losses, evaluations = _records(tmp_path / "command")
    assert (len(losses), len(evaluations)) == (2 * 2, 2 * 2)  # the second step has half as many images
    found = _records(tmp_path / "loop")
    assert found[0] == pytest.approx(losses, rel=1e-9, abs=1e-9)
    assert found[1] == pytest.approx(evaluations, rel=1e-9, abs=1e-9)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
