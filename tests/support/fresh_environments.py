"""Build the distributions with uv and install them into new environments; skip where no package index is reachable."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT


def build(out: Path) -> list[Path]:
    """Build both source distributions and, from them alone, the wheels; return the wheels."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    for folder in (ROOT, ROOT / "compat" / "horovod"):
        _uv("build", "--out-dir", out, folder)
    return sorted(out.glob("*.whl"))


def install(environment: Path, *arguments: str | Path) -> None:
    """Create an environment with this Python's version, and install packages with everything that they require."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    _uv("venv", "--quiet", "--no-project", "--python", python, environment)
    _uv("pip", "install", "--quiet", "--python", environment, *arguments)


def _uv(*arguments: str | Path) -> None:
    done = subprocess.run(["uv", *arguments], capture_output=True, text=True)
    if "error sending request" in done.stderr or "dns error" in done.stderr:
        pytest.skip("the package index is not reachable")
    assert done.returncode == 0, done.stderr
