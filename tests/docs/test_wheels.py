"""Both distributions as their users get them: built from their sources, installed, and used from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import own_environment, run
from fresh_environments import build, install
from pages import ROOT

SCRIPT = """
import horovod.torch as hvd, torch, lockstep
hvd.init()
print(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum).item(), lockstep.__file__)
"""
pytestmark = pytest.mark.cold


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distributions, and the wheels that are built from them alone."""
    out = tmp_path_factory.mktemp("dist")
    build(out)
    return out


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheels, and nothing of this folder's; it sees the libraries of ours."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    wheels = sorted(distributions.glob("*.whl"))
    python = folder / "bin" / "python"
    uv = str(shutil.which("uv"))
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, *wheels], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose own .pth files are not read
    return folder / "bin"


def test_each_has_its_license_its_types_and_its_data(distributions: Path) -> None:
    torch_wheel, horovod_wheel = (
        ZipFile(next(distributions.glob(f"{name}-*.whl"))).namelist() for name in ("lockstep_torch", "lockstep_horovod")
    )
    for names, package in ((torch_wheel, "lockstep"), (horovod_wheel, "horovod")):
        assert f"{package}/py.typed" in names
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        folders = {name.partition("/")[0] for name in names}
        assert all(folder == package or folder.endswith(".dist-info") for folder in folders)
    sources = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= set(torch_wheel)
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "compat" / "horovod" / "LICENSE").read_bytes()
    with tarfile.open(next(distributions.glob("lockstep_torch-*.tar.gz"))) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name or "/benchmarks/" in name]


def test_the_main_command_and_horovods_work_from_the_wheels(installed: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(installed), os.environ["PATH"]])
    env = own_environment(PATH=path, PYTHONPATH="", OMP_NUM_THREADS="1")
    words = ["train", "-np", "2", "--device", "cpu", "--epochs", "1", "--run-dir", "run"]
    done = run([installed / "lockstep", *words], tmp_path, env, cold=True)
    assert done.returncode == 0, done.stderr
    assert "validation images right, over 2 workers" in done.stdout
    assert run([installed / "lockstep", "report", "run", "-o", "report"], tmp_path, env, cold=True).returncode == 0
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run([installed / "horovodrun", "-np", "2", "python", "script.py"], tmp_path, env, cold=True)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(">:")[2].split() for line in done.stdout.splitlines() if ">:" in line]
    assert [value for value, _ in lines] == ["3.0", "3.0"]
    assert all(Path(file).is_relative_to(installed.parent) for _, file in lines)


@pytest.mark.long
def test_main_command_works_in_an_empty_environment(distributions: Path, tmp_path: Path) -> None:
    install(tmp_path / "venv", *sorted(distributions.glob("*.whl")))
    env = own_environment(PYTHONPATH="")
    words = ["train", "-np", "2", "--device", "cpu", "--run-dir", "run"]
    done = run([tmp_path / "venv" / "bin" / "lockstep", *words], tmp_path, env, cold=True)
    assert done.returncode == 0, done.stderr
    assert "validation images right, over 2 workers" in done.stdout
