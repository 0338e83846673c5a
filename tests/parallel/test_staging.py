"""`--stage` on this machine: which arguments name the copies, and imports from a copied environment."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import product
from pathlib import Path

import pytest
from commands import LOCKSTEP, own_environment, run
from PIL import Image
from small_torch import write_small_torch

SCRIPT = """
import json, multiprocessing, os, sys, wave
import shared_package, torch

def place():
    import shared_package
    return shared_package.__file__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        loader = pool.apply(place)
    print(json.dumps([shared_package.__file__, torch.__file__, wave.__file__, loader, sys.path[0]]))
"""


UNUSED = {"site-packages", "test", "idlelib", "ensurepip", "pydoc_data"}  # of the standard library: 0.8 GB
# 2.4 of 7.5 GB to copy, which the script does not import.
LEFT_OUT = {"triton", "ray", "pyarrow", "transformers", "zensical", "vl_convert", "pandas", "onnxruntime"}


NEEDED = ("psutil", "yaml", "_yaml", "lockstep", "_editable_impl_lockstep")  # beside torch


@pytest.fixture(params=["small torch", pytest.param("torch", marks=pytest.mark.long)])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Python and a virtual environment of links to those of the tests, with a package of its own."""
    library = tmp_path / "venv" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    library.mkdir(parents=True)
    is_small = request.param == "small torch"
    if is_small:
        write_small_torch(library)
    for folder in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for path in folder.iterdir():
            is_linked = path.name.startswith(NEEDED) if is_small else path.name not in LEFT_OUT
            if is_linked and not os.path.lexists(library / path.name):
                (library / path.name).symlink_to(path)
    (library / "shared_package.py").touch()
    standard = Path(json.__file__).parents[1]
    for path in standard.iterdir():
        if path.name not in UNUSED and not path.name.startswith("config-"):
            link = tmp_path / "base" / "lib" / standard.name / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    for name in ("base", "venv"):
        (tmp_path / name / "bin").mkdir()
        (tmp_path / name / "bin" / "python").symlink_to(getattr(sys, "_base_executable", sys.executable))
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {tmp_path / 'base' / 'bin'}\n")
    return tmp_path / "venv"


def test_workers_import_from_the_copies(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "script.py").write_text(SCRIPT)
    python = environment / "bin" / "python"
    command = [python, "-m", "lockstep", "run", "-np", "1", "--stage", "environment", "--stage-dir", tmp_path]
    variables = own_environment(IMPORTS=str(tmp_path / "imports"))
    done = run([*command, "--", python, "script.py"], tmp_path / "job", variables, cold=True)
    assert done.returncode == 0, done.stderr
    package, torch, standard, loader, first = json.loads(done.stdout.splitlines()[-1])
    copies = str(tmp_path / "lockstep-staged-")
    assert package.startswith(copies)
    assert torch.startswith(copies)
    assert loader == package
    assert standard.startswith("/usr/" if json.__file__.startswith("/usr/") else copies)
    assert first == str(tmp_path / "job")
    assert not [*tmp_path.glob("lockstep-staged-*")], "removed with the job"


def test_only_arguments_that_exist_name_the_copies(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").touch()
    run_ = [*LOCKSTEP, "run", "-np", "1", "--no-observe", "--stage", data, "--stage-dir", tmp_path, "--"]
    done = run([*run_, "sh", "-c", 'echo "$0 $1 $2"', f"--data={data}", data / "file", data / "output"], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()[-1].split()
    copy = first.removeprefix("--data=")
    assert re.fullmatch(f"{tmp_path}/lockstep-staged-[0-9a-f]+/0/data", copy)
    assert (second, third) == (f"{copy}/file", f"{data}/output")
    assert "the command names no file" not in done.stderr
    done = run([*run_, "sh", "-c", "echo $LOCKSTEP_STAGED"], tmp_path)
    assert f"the command names no file in {data}; the script finds the copy by lockstep.staged" in done.stderr
    assert [*json.loads(done.stdout.splitlines()[-1])] == [str(data)]
    assert not [*tmp_path.glob("lockstep-staged-*")]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("/nonexistent/data", "/nonexistent/data does not exist, or is neither a file nor a folder"),
        ("environment", "needs workers that are forked from Lockstep's Python: sh is not run by"),
    ],
)
def test_staging_that_fails_names_the_reason(tmp_path: Path, stage: str, message: str) -> None:
    done = run([*LOCKSTEP, "run", "--stage", stage, "--stage-dir", tmp_path, "--", "sh", "-c", "true"], tmp_path)
    assert done.returncode in (2, 3)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_training_records_the_path_as_it_is_given(tmp_path: Path) -> None:
    for split, kind, number in product(("train", "val"), ("a", "b"), range(4)):
        folder = tmp_path / "images" / split / kind
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (200 * (kind == "a"), 10 * number, 0)).save(folder / f"{number}.png")
    train = [*LOCKSTEP, "train", tmp_path / "images", "-np", "1", "--epochs", "1", "-b", "4", "-a", "cifar-small"]
    train += ["--image-size", "32", "--device", "cpu", "-j", "0", "--run-dir", tmp_path / "run"]
    done = run([*train, "--stage", tmp_path / "images", "--stage-dir", tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "copying" in done.stderr
    assert f"dataset: {tmp_path / 'images'}\n" in (tmp_path / "run" / "config.yaml").read_text()
    environment = {**os.environ, "LOCKSTEP_STAGED": json.dumps({str(tmp_path / "images"): "/nowhere"})}
    done = run([*train[:-1], tmp_path / "again"], tmp_path, env=environment)
    assert done.returncode != 0
    assert "/nowhere" in done.stderr
    torchrun = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0") | dict.fromkeys(
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
    )
    environment = {**os.environ, **torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run([*train, "--stage", tmp_path], tmp_path, env=environment)
    assert done.returncode == 2
    assert "--stage is for the launcher, but torchrun has started this process" in done.stderr
