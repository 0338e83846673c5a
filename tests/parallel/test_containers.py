"""Jobs whose workers run in containers: really by Charliecloud, and by stand-ins for the other runtimes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, Done, own_environment, run, started
from runtimes import BOUND, PROGRAMS, RUNTIMES, install, make_image
from time_limits import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
SCRIPT = """
import os, sys
import horovod.torch as hvd
import lockstep, torch

hvd.init()
total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum).item()
if hvd.rank() == 0:
    own = os.environ.get("VIRTUAL_ENV"), os.environ["MINE"]
    print(total, lockstep.__file__, *own, os.path.exists("/var"), os.getcwd())
    open("written", "w").close()
    try:
        open("/lost", "w")
    except OSError as error:
        print(error)
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return make_image(tmp_path / "image")


def _flags(image: Path) -> list[str]:
    return ["--container", str(image), "--bind-mount", BOUND, "--python", sys.executable]


def _environment(tmp_path: Path, **more: str) -> dict[str, str]:
    own = own_environment(OMP_NUM_THREADS="1", USER="tester", XDG_CACHE_HOME=str(tmp_path / "cache"), MINE="7")
    return {**own, "VIRTUAL_ENV": "/of/this/machine", **more}


SHORT = ("apptainer", "docker")  # lockstep.launch.plan.containers builds most others like one of them
needs_charliecloud = pytest.mark.skipif(not shutil.which("ch-run"), reason="ch-run is not installed")


@needs_charliecloud
def test_script_runs_in_an_image(tmp_path: Path, image: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*LOCKSTEP, "run", "-np", "2", *_flags(image), "--", sys.executable, "script.py"]
    _check(run(command, tmp_path, _environment(tmp_path)), tmp_path, "/mnt/9")


def _check(done: Done, tmp_path: Path, packages: str) -> None:
    assert done.returncode == 0, done.stderr
    words, refused = done.stdout.strip().splitlines()[-2:]
    assert words == f"3.0 {packages}/first/lockstep/__init__.py None 7 False {tmp_path}"
    assert "Read-only file system" in refused
    assert (tmp_path / "written").exists()


@needs_charliecloud
def test_staged_data_are_visible_in_an_image(tmp_path: Path, image: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("staged")
    command = [*LOCKSTEP, "run", "--stage", tmp_path / "data", "--stage-dir", tmp_path, *_flags(image)]
    done = run([*command, "--", "cat", tmp_path / "data" / "file"], tmp_path, _environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "staged"
    assert "copying" in done.stderr
    done = run([*command, "--stage=environment", "--", "cat", "file"], tmp_path, _environment(tmp_path))
    assert done.returncode == 2
    assert "--stage environment: the image of --container has the environment" in done.stderr


@needs_charliecloud
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--python", "/none/python"],
            "the container did not start: sh: 1: exec: /none/python: not found",
        ),
        (["--bind-mount", "/var"], "the container did not start: ch-run"),
    ],
)
def test_image_that_cannot_be_used_is_an_error(tmp_path: Path, image: Path, flags: list[str], message: str) -> None:
    command = [*LOCKSTEP, "run", "-np", "2", *_flags(image), *flags, "--", sys.executable, "-c", "pass"]
    done = run(command, tmp_path, _environment(tmp_path))
    assert done.returncode == 3
    assert f"lockstep: localhost: {message}" in done.stderr


@needs_charliecloud
def test_workers_in_an_image_end_with_the_launcher(tmp_path: Path, image: Path) -> None:
    command = [*LOCKSTEP, "run", "-np", "2", *_flags(image), "--", sys.executable, "wait.py"]
    (tmp_path / "wait.py").write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)\n")
    with started(command, tmp_path, _environment(tmp_path)) as job:
        job.wait_until(lambda: job.text.count("pid ") == 2)
        workers = [int(line.split()[1]) for line in job.text.splitlines() if line.startswith("pid ")]
        os.kill(job.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, workers)))


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in RUNTIMES]
)
def test_other_runtimes_start_workers(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--container", "site/image:1", "--container-runtime", name, "--bind-mount", ",".join(PROGRAMS)]
    environment = _environment(tmp_path, PATH=install(tmp_path / "bin", name))
    command = [*LOCKSTEP, "run", "-np", "2", *flags, "--python", sys.executable, "--", sys.executable, "script.py"]
    done = run(command, tmp_path, environment)
    packages = next((tmp_path / "cache" / "lockstep").iterdir()) if name == "shifter" else "/opt/lockstep"
    _check(done, tmp_path, str(packages))
