"""Command lines of container runtimes, against a golden file, and errors in the flags.

`python tests/single/launch/plan/test_containers.py` rewrites the golden file. Its lines follow the manuals that
`lockstep.launch.plan.containers` names; `tests/parallel/test_containers.py` runs them.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.controller.image_packages import UNUSED_SECONDS, copy_packages
from lockstep.launch.controller.start_errors import StartError, why_not_started
from lockstep.launch.plan.batch_script import BatchJob, render
from lockstep.launch.plan.containers import RUNTIMES, Container, ContainerOptions, find_container, packages_folder
from lockstep.launch.plan.horovodrun_plan import plan_horovod
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import JobPlan, Kind, NodePlan, Transport, plan_job
from lockstep.launch.plan.options import LaunchOptions, plan_from

GOLDEN = Path(__file__).parent / "golden" / "containers.txt"
HERE = frozenset({"localhost", "me"})


def lines() -> str:
    found = []
    for runtime in (*RUNTIMES, "pyxis"):
        mounts = ("/data", "/scratch/env.sqsh:/env:image-src=/")
        container = Container("site/torch:2.11", runtime, "/home/u/job", "/home/u/.cache/lockstep/packages-1", mounts)
        kind: Kind = "slurm" if runtime == "pyxis" else "local"
        plan = plan_job(["python3"], [Host("b", 1)], Transport(kind, container=container), 1, {}, HERE)
        found.append(f"# {runtime}\n{shlex.join(plan.nodes[0].start)}")
    return "\n\n".join(found) + "\n"


def test_command_lines_are_those_of_the_golden_file() -> None:
    assert lines() == GOLDEN.read_text()


def plan(*flags: str, environment: dict[str, str] | None = None, **options: object) -> NodePlan:
    containers = ContainerOptions("site/torch:2.11", "docker", *flags)
    where = LaunchOptions(containers=containers, **options)  # type: ignore[arg-type]
    found = plan_from(where, 2, ["python3", "x.py"], environment or {}, 2, lambda: 0, HERE)
    assert found.container
    return found.nodes[0]


def test_workers_get_no_variables_of_this_machines_programs() -> None:
    own = dict.fromkeys(("PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME"), "/here")
    others = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1"}
    here = plan(environment={**own, **others})
    assert here.environment({**own, **others}) == others
    there = plan(environment={**own, **others}, hosts="b:2")
    assert there.environment({**own, **others}) == {"NCCL_DEBUG": "INFO"}


def test_python_of_the_image_runs_lockstep() -> None:
    options = ContainerOptions("site/torch:2.11")
    assert LaunchOptions(containers=options).python_of_workers == "python3"
    assert LaunchOptions(containers=options, python="/conda/bin/python").python_of_workers == "/conda/bin/python"
    assert LaunchOptions().python_of_workers == sys.executable
    assert plan(python="/conda/bin/python").start[-1].endswith("exec /conda/bin/python -P -m lockstep.launch.node'")


def test_first_installed_runtime_is_used(tmp_path: Path) -> None:
    for name in ("docker", "ch-run"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    found = find_container(ContainerOptions("x"), {"PATH": str(tmp_path), "HOME": "/me"}, "/job")
    assert found
    assert found.runtime == "charliecloud"
    with pytest.raises(ConfigError, match=r"PATH has none of apptainer, singularity, .*; load a module"):
        find_container(ContainerOptions("x"), {"PATH": "/nonexistent"}, "/job")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ContainerOptions("", "docker"), "--container-runtime docker needs --container IMAGE"),
        (lambda: ContainerOptions("", None, "/data"), "--bind-mount /data needs --container IMAGE"),
        (lambda: plan("/none/data:/data"), "--bind-mount /none/data:/data: /none/data does not exist"),
        (
            lambda: find_container(ContainerOptions("/nonexistent/torch.sif", "docker"), {}, "/job"),
            "--container /nonexistent/torch.sif: no such file",
        ),
        (
            lambda: find_container(ContainerOptions("x", "docker"), {}, "/job:2"),
            "--container: /job:2 cannot be made visible in an image, because it contains , or :",
        ),
        (
            lambda: plan_from(
                LaunchOptions(containers=ContainerOptions("x", "pyxis")), 1, ["python3"], {}, 1, lambda: 0, HERE
            ),
            "--container-runtime pyxis is a part of Slurm's srun: use it in a Slurm job",
        ),
        (
            lambda: render("slurm", BatchJob(), ["lockstep", "train", "mnist", "--container", "x"]),
            "the script starts the launcher of these flags; move --container before --",
        ),
    ],
)
def test_wrong_flags_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


def test_pyxis_starts_one_container_per_host_of_a_slurm_job() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "me", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODELIST": "me"}
    where = LaunchOptions(containers=ContainerOptions("site#torch:2.11", "pyxis"))
    found = plan_from(where, 2, ["python3"], environment, 2, lambda: 0, HERE)
    assert "--container-image=site#torch:2.11" in found.nodes[0].start
    assert "srun" in found.nodes[0].start


def test_batch_scripts_start_the_container() -> None:
    job = BatchJob(containers=ContainerOptions("my image.sif", "apptainer", "/data"))
    flags = "--container 'my image.sif' --container-runtime apptainer --bind-mount /data"
    assert f"lockstep run {flags} -- \\\n" in render("slurm", job, ["python3", "train.py"])
    assert f"lockstep study scaling {flags} \\\n" in render("slurm", job, ["lockstep", "study", "scaling", "-np", "2"])


def test_horovodrun_takes_a_container() -> None:
    flags = {"num_proc": 2, "container": "x", "container_runtime": "docker", "bind_mount": "/usr"}
    found = plan_horovod(flags, ["python3", "x.py"], 2, {}, HERE).job
    assert isinstance(found, JobPlan)
    assert found.container
    assert (found.container.image, found.container.mounts) == ("x", ("/usr",))
    with pytest.raises(ConfigError, match="--container-runtime dockr: must be one of apptainer, "):
        plan_horovod({**flags, "container_runtime": "dockr"}, ["python3", "x.py"], 2, {}, HERE)


def test_packages_are_copied_once_and_old_copies_removed(tmp_path: Path) -> None:
    folder = packages_folder({"XDG_CACHE_HOME": str(tmp_path)})
    old, recent = folder.with_name("packages-old"), folder.with_name("packages-recent")
    for path in (old, recent):
        path.mkdir(parents=True)
    os.utime(old, times=(0, time.time() - UNUSED_SECONDS - 60))
    copy_packages(folder)
    assert (folder / "first" / "lockstep" / "__init__.py").is_file()
    assert (folder / "last" / "psutil").is_dir()
    assert not list(folder.rglob("__pycache__"))
    copied = (folder / "first").stat().st_ino
    copy_packages(folder)
    assert (folder / "first").stat().st_ino == copied
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, recent.name])


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "lockstep").write_text("")
    with pytest.raises(StartError, match=r"packages cannot be copied for the image to .*/lockstep: "):
        copy_packages(packages_folder({"XDG_CACHE_HOME": str(tmp_path)}))


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("Unknown option: -P\nusage: python3 ...", "the image's Python is older than 3.11"),
        ("ModuleNotFoundError: No module named 'psutil._psutil_linux'", "has no package psutil._psutil_linux"),
        (
            "FATAL:   container creation failed: mount hook\n\nfor help, see ...",
            "did not start: FATAL:   container creation",
        ),
        ("docker: invalid reference format\n\nRun 'docker run --help' for more", "did not start: docker: invalid"),
    ],
)
def test_containers_that_do_not_start_are_explained(stderr: str, message: str) -> None:
    node = NodePlan("b", 1, ("sh", "-c", "..."), is_here=False, in_container=True)
    assert message in why_not_started(node, 1, stderr)


def test_faults_of_ssh_are_not_the_containers() -> None:
    node = NodePlan("b", 1, ("ssh", "b", "exec sh -c ..."), is_here=False, in_container=True)
    assert why_not_started(node, 255, "Host key verification failed.").startswith(
        "b has an unknown or changed host key"
    )


if __name__ == "__main__":
    GOLDEN.write_text(lines())
