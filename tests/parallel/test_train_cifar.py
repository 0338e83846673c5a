"""The example loop trains what `lockstep train` trains with the recipe for CIFAR-10: equal losses in float64."""

from __future__ import annotations

import sys
import zipfile
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


def _compare(images: Path, size: int, global_batch: int, steps: int, folder: Path) -> None:
    """Train two epochs of so many steps by the command and by the example."""
    options = ["--epochs", "2", "--batch-size", str(global_batch // size), "--log-every", "1", "--run-dir"]
    workers, numbers = ["-np", str(size)], ["--precision", "fp64", "--device", "cpu"]
    train = [*LOCKSTEP, "train", images, "--config", "cifar10", *workers, *numbers, *options, folder / "command"]
    loop = [*LOCKSTEP, "run", *workers, "--", sys.executable, EXAMPLE, images, "--fp64", *options, folder / "loop"]
    for command in (train, loop):
        done = run(command, folder)
        assert done.returncode == 0, done.stdout + done.stderr
    losses, evaluations = _records(folder / "command")
    assert (len(losses), len(evaluations)) == (2 * steps, 2 * 2)
    found = _records(folder / "loop")
    assert found[0] == pytest.approx(losses, rel=1e-9, abs=1e-9)
    assert found[1] == pytest.approx(evaluations, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("size", [1, 2])
def test_the_loop_has_the_losses_of_the_command(size: int, tmp_path: Path) -> None:
    images = make_folder(tmp_path / "images", sizes=((32, 32),), train=6, val=2)
    _compare(images, size, global_batch=8, steps=2, folder=tmp_path)  # the second step has half as many images


@pytest.mark.parametrize("size", [1, 2])
def test_the_losses_are_equal_on_real_images(size: int, tmp_path: Path, shared_data: Path) -> None:
    with zipfile.ZipFile(shared_data / "cifar10-jpeg.zip") as archive:
        chosen = [name for name in archive.namelist() if name.endswith(("0000.jpg", "0001.jpg"))]
        archive.extractall(tmp_path, chosen)
    _compare(tmp_path / "cifar10", size, global_batch=8, steps=3, folder=tmp_path)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
