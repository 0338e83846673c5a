"""`--stage` as it is planned: its options, the command's arguments, and the folders of a Python environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import ConfigError
from lockstep.files.staged import STAGED, copy_of
from lockstep.launch.plan.batch_script import BatchJob, render
from lockstep.launch.plan.horovodrun_plan import plan_horovod
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.staging.stage_options import (
    StageOptions,
    environment_folders,
    path_in,
    staged_variable,
    with_copies,
)
from lockstep.launch.staging.stager import Stager

COPIES = {"/shared/data": "/tmp/copies/1/files/data", "/shared/data2": "/tmp/copies/2/files/data2"}
PYTHON = "python{}.{}".format(*sys.version_info)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "data"}, "--stage data: must be an absolute path, which the command has too, or environment"),
        ({"stage": "/a,b"}, "--stage b: must be an absolute path"),
        ({"stage": "/"}, "--stage /: must be an absolute path"),
        ({"stage": "/a", "stage_dir": "here"}, "--stage-dir here: must be an absolute path$"),
        ({"stage_dir": "/tmp"}, "--stage-dir /tmp needs --stage"),
    ],
)
def test_wrong_options_name_the_fix(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageOptions(**options)


def test_folder_belongs_to_this_launcher() -> None:
    first, second = StageOptions("/a", "/disk").folder, StageOptions("/b", "/disk").folder
    assert first == second
    assert re.fullmatch("/disk/lockstep-staged-[0-9a-f]{16}", first)


def test_sources_are_listed_once() -> None:
    assert StageOptions("environment, /a/,/a/./b,/a").sources == ("environment", "/a", "/a/b")


def test_arguments_in_a_staged_path_name_the_copy() -> None:
    command = [
        *("/shared/data/python", "/shared/train.py", "--data=/shared/data", "/shared/data//train/../train"),
        *("/shared/data3", "x=y", "/shared/data/new"),
    ]
    named = [path for path in map(path_in, command[1:]) if copy_of(path, COPIES)]
    assert named == ["/shared/data", "/shared/data//train/../train", "/shared/data/new"]
    existing = {path: copy_of(path, COPIES) for path in named if not path.endswith("new")}
    assert with_copies(command, existing) == (
        *(
            "/shared/data/python",
            "/shared/train.py",
            "--data=/tmp/copies/1/files/data",
            "/tmp/copies/1/files/data/train",
        ),
        *("/shared/data3", "x=y", "/shared/data/new"),
    )


def test_host_finds_the_existing_paths_of_arguments(here: Path) -> None:
    (here / "data" / "train").mkdir(parents=True)
    stager, data = Stager(), str(here / "data")
    stager.folder = Path("/disk")
    given = [data, f"{data}//train/../train", f"{data}/new", "data", str(here), "x"]
    found = stager.find([data], "", given)
    assert found["copies"] == {data: "/disk/0/data"}
    assert found["named"] == {data: "/disk/0/data", f"{data}//train/../train": "/disk/0/data/train"}


def test_script_finds_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lockstep.staged("/shared/data/x") == "/shared/data/x"
    monkeypatch.setenv(STAGED, staged_variable(COPIES)[STAGED])
    assert lockstep.staged(Path("/shared/data/x")) == "/tmp/copies/1/files/data/x"
    assert lockstep.staged("/shared/data2") == "/tmp/copies/2/files/data2"
    assert lockstep.staged("/shared/data/../out") == "/shared/data/../out"
    assert lockstep.staged("/shared/data3") == "/shared/data3"
    monkeypatch.chdir("/tmp")
    assert lockstep.staged("data") == "data"


def test_environment_is_the_lib_folders_of_this_version() -> None:
    entries = [
        "/project/src",
        "/soft/python/lib/python311.zip",
        f"/soft/python/lib/{PYTHON}",
        f"/soft/python/lib/{PYTHON}/lib-dynload",
        f"/home/user/.local/lib/{PYTHON}/site-packages/",
        f"/home/user/envs/{PYTHON}/lib64/{PYTHON}/site-packages/package",
        f"/usr/lib/{PYTHON}",
        f"/opt/{PYTHON}/site-packages",
        "/opt/lib/python2.7/site-packages",
    ]
    assert environment_folders(entries) == {
        "/soft/python/lib": (f"{PYTHON}/site-packages",),
        "/home/user/.local/lib": (),
        f"/home/user/envs/{PYTHON}/lib64": (),
    }


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["sh", "-c", "true"], {}, "--stage environment needs workers that are forked from Lockstep's Python: sh is"),
        (["python"], {"preload": False}, "--stage environment needs workers that are forked"),
    ],
)
def test_staging_that_cannot_work_is_refused(command: list[str], options: dict[str, object], message: str) -> None:
    command = [sys.executable if word == "python" else word for word in command]
    where = LaunchOptions(staging=StageOptions("environment"), **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        plan_from(where, 1, command, {"PATH": "/bin"}, 2, lambda: 0, frozenset({"localhost"}))


def test_caches_are_beside_a_copied_environment() -> None:
    command, disk = [sys.executable, "a.py"], "/disk"
    environment = {"PATH": "/bin", "TRITON_CACHE_DIR": "/own"}
    added = []
    for stage in ("environment", "/data"):
        where = LaunchOptions(staging=StageOptions(stage, disk))
        plan = plan_from(where, 1, command, environment, 2, lambda: 0, frozenset({"localhost"}))
        added.append({name: path for name, path in plan.environment.items() if path.startswith(disk)})
    folder = f"{where.staging.folder}/caches/miopen"
    assert added == [{"MIOPEN_USER_DB_PATH": folder, "MIOPEN_CUSTOM_CACHE_DIR": folder}, {}]


def test_batch_scripts_start_the_launcher_with_the_flags() -> None:
    job, command = BatchJob(staging=StageOptions("/data", "/disk")), ["lockstep", "train", "/data"]
    assert "lockstep run --stage /data --stage-dir /disk -- \\\n" in render("slurm", job, command)
    with pytest.raises(ConfigError, match="the script starts the launcher of these flags; move --stage before --"):
        render("slurm", job, [*command, "--stage", "/data"])


def test_horovodrun_has_the_flags() -> None:
    names = {"stage": "/data", "stage_dir": "/disk", "num_proc": 1}
    plan = plan_horovod(names, ["python", "a.py"], 2, {"PATH": "/bin"}, frozenset({"localhost"}))
    assert plan.where.staging == StageOptions("/data", "/disk")
