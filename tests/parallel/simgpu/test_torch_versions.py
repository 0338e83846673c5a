"""The simulated GPU, and Lockstep on it, with a torch between the oldest and the newest that CI installs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fresh_environments import install
from pages import ROOT

TESTS = ["tests/single/simgpu", "tests/parallel/simgpu"]


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("simulated_gpu")
def test_torch_2_11_passes_the_same_tests(tmp_path: Path) -> None:
    packages = ("torch==2.11.0", "torchvision==0.26.0", "--group", f"{ROOT}/pyproject.toml:dev")
    install(tmp_path / "environment", *packages, "--editable", ROOT, "--editable", ROOT / "compat" / "horovod")
    allowed = [f"-Wignore:`torch.jit.{name}` is deprecated:DeprecationWarning" for name in ("script", "interface")]
    options = ["-n", "2", "-p", "no:cacheprovider", *allowed]  # torch warns of its own use
    command = [tmp_path / "environment/bin/python", "-m", "pytest", *options, *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
