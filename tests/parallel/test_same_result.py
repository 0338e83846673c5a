"""One training command gives one result, whoever starts its two workers. SSH and Slurm have theirs in tests/cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import final_weights

TRAIN = ["-m", "lockstep", "train", "digits", "--epochs", "1", "--device", "cpu", "--run-dir"]
LAUNCHERS = {
    "lockstep run": [sys.executable, "-m", "lockstep", "run", "-np", "2", "--", sys.executable],
    "horovodrun": [sys.executable, "-m", "lockstep.cli.horovodrun", "-np", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
    "MPICH": ["mpirun.mpich", "-np", "2", sys.executable],
}


def _train(words: list[str], folder: Path) -> bytes:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "over 2 workers" in done.stdout
    return final_weights(folder / "run")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _train([sys.executable, *TRAIN, "run", "-np", "2"], tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_weights_are_the_same_to_the_bit(launcher: str, expected: bytes, tmp_path: Path) -> None:
    words = LAUNCHERS[launcher]
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} (Debian: openmpi-bin, mpich)")
    assert _train([*words, *TRAIN, "run"], tmp_path) == expected
