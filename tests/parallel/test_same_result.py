"""One training command gives one result, whatever starts its workers. SSH and Slurm: tests in tests/cluster."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from commands import HOROVODRUN, LOCKSTEP, MPICH, OPEN_MPI, TORCHRUN, Command, of_one_thread, run
from runs import final_weights

TRAIN = ["-m", "lockstep", "train", "digits", "--epochs", "1", "--device", "cpu", "--run-dir"]
LAUNCHERS = {
    "lockstep run": (*LOCKSTEP, "run", "-np", "2", "--", sys.executable),
    "horovodrun": (*HOROVODRUN, "-np", "2", sys.executable),
    "torchrun": TORCHRUN,
    "Open MPI": (*OPEN_MPI, "-np", "2", sys.executable),
    "MPICH": (*MPICH, "-np", "2", sys.executable),
}


def _train(words: Command, folder: Path) -> bytes:
    done = run(words, folder, of_one_thread())
    assert done.returncode == 0, done.stderr
    assert "over 2 workers" in done.stdout
    return final_weights(folder / "run")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _train([sys.executable, *TRAIN, "run", "-np", "2"], tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[pytest.mark.cold] * ("MPI" in name)) for name in LAUNCHERS]
)
def test_the_weights_are_the_same_to_the_bit(launcher: str, expected: bytes, tmp_path: Path) -> None:
    words = LAUNCHERS[launcher]
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} (Debian: openmpi-bin, mpich)")
    assert _train([*words, *TRAIN, "run"], tmp_path) == expected
