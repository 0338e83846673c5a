"""`--stage environment`: workers import from copies of the Python environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commands import run

SCRIPT = """
import json, multiprocessing, os, sys
import shared_package, torch

def place():
    import shared_package
    return shared_package.__file__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        loader = pool.apply(place)
    print(json.dumps([shared_package.__file__, torch.__file__, json.__file__, loader, sys.path[0]]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment whose packages are links to those of the tests, but for a package of its own."""
    library = tmp_path / "venv" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    library.mkdir(parents=True)
    for folder in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for path in folder.iterdir():
            if not os.path.lexists(library / path.name):
                (library / path.name).symlink_to(path)
    (library / "shared_package.py").touch()
    python = Path(getattr(sys, "_base_executable", sys.executable))
    (tmp_path / "venv" / "bin").mkdir()
    (tmp_path / "venv" / "bin" / "python").symlink_to(python)
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {python.parent}\n")
    return tmp_path / "venv"


def test_workers_import_from_the_copies(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "script.py").write_text(SCRIPT)
    python = environment / "bin" / "python"
    command = [python, "-m", "lockstep", "run", "-np", "1", "--stage", "environment", "--stage-dir", tmp_path]
    done = run([*command, "--", python, "script.py"], tmp_path / "job", cold=True)
    assert done.returncode == 0, done.stderr
    package, torch, standard, loader, first = json.loads(done.stdout.splitlines()[-1])
    copies = str(tmp_path / f"lockstep-staged-{os.getuid()}")
    assert package.startswith(copies)
    assert torch.startswith(copies)
    assert loader == package
    assert standard.startswith((copies, "/usr/"))
    assert first == str(tmp_path / "job")
