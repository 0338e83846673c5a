"""Batch jobs and scripts: wrong flags, the text against golden files, and what it does with a stand-in launcher.

`python tests/single/launch/plan/test_batch_script.py` rewrites the golden files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from time_limits import extended, wait_until

from lockstep.errors import ConfigError
from lockstep.launch.plan.batch_script import BatchJob, System, render

GOLDEN = Path(__file__).parent / "golden"
TRAIN = ("lockstep", "train", "cifar10", "-a", "resnet18")
GPUS = BatchJob(
    nodes=2,
    gpus_per_node=4,
    cpus_per_worker=8,
    time="1-12:00:00",
    name="cifar",
    account="abc123",
    queue="gpu",
    setup="module load cuda\nsource venv/bin/activate",
)
CPUS = BatchJob(workers=2, time="00:04:00")
SYSTEMS: tuple[System, ...] = ("slurm", "pbs", "lsf", "flux")
CASES = {
    **{f"{system}-gpus": (system, GPUS, TRAIN) for system in SYSTEMS if system != "flux"},
    "flux-gpus": ("flux", replace(GPUS, cpus_per_worker=None), TRAIN),
    **{f"{system}-cpus": (system, CPUS, ("python", "my script.py", "--name", "it's")) for system in SYSTEMS},
}
# Writes down the signals that it gets, and ends after the first with the code that it is told.
LAUNCHER = """#!/bin/bash
echo "$@" > words
[ -n "$FIRST" ] || exit "$CODE"
trap 'echo USR1 >> got' USR1
trap 'echo TERM >> got' TERM
touch ready
while [ ! -e got ]; do sleep 0.05; done
sleep 0.3
exit "$CODE"
"""
HOSTLIST = """#!/bin/sh
[ "$*" = "hostlist --expand --delimiter=:1, instance" ] && echo tuolumne1:1,tuolumne2
"""


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_file(name: str) -> None:
    assert render(*CASES[name]) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", CASES)
def test_bash_reads_the_script(name: str) -> None:
    subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], check=True)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (TRAIN, f'{" ".join(TRAIN)} --run-dir "runs/lockstep-$SLURM_JOB_ID" --resume auto &'),
        ((*TRAIN, "--resume", "runs/x"), f"{' '.join(TRAIN)} --resume runs/x &"),
        ((*TRAIN, "--resume=auto"), f"{' '.join(TRAIN)} --resume=auto &"),
        ((*TRAIN, "--run-dir", "a b"), f"{' '.join(TRAIN)} --run-dir 'a b' --resume auto &"),
        (("python3", "-m", "lockstep", "train"), 'train --run-dir "runs/lockstep-$SLURM_JOB_ID" --resume auto &'),
        (("/opt/bin/lockstep", "train"), 'train --run-dir "runs/lockstep-$SLURM_JOB_ID" --resume auto &'),
        (("lockstep", "eval", "runs/x"), "    lockstep eval runs/x &"),
        (("python", "train.py"), "    python train.py &"),
        (("echo", "$HOME", "a;b"), "    echo '$HOME' 'a;b' &"),
    ],
)
def test_training_goes_on_where_it_stopped(command: tuple[str, ...], expected: str) -> None:
    started = [line for line in render("slurm", BatchJob(), command).splitlines() if line.endswith("&")]
    assert len(started) == 1
    assert started[0].endswith(expected)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "add it after --, for example"),
        (("",), "add it after --, for example"),
        (("lockstep", "run", "--", "python", "x.py"), "remove lockstep run"),
        (("srun", "python", "x.py"), "remove srun"),
        (("/usr/bin/mpirun", "python", "x.py"), "remove mpirun"),
        ((*TRAIN, "-np", "4"), "remove -np"),
        ((*TRAIN, "--np=4", "-H", "a:4"), "remove --np, -H"),
    ],
)
def test_a_command_that_starts_workers_itself_is_refused(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render("slurm", BatchJob(), command)


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder to be in, whose bin/ has a launcher, squeue (which says $STATE) and scontrol."""
    programs = {
        "lockstep": LAUNCHER,
        "flux": HOSTLIST,
        "squeue": '#!/bin/sh\necho "$STATE"\n',
        "scontrol": '#!/bin/sh\necho "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run_script(system: System, folder: Path, code: int, signals: str = "", state: str = "RUNNING") -> tuple[int, str]:
    """Run a script whose launcher ends with `code`, after it got a signal where there are: exit code and output."""
    (folder / "job.sh").write_text(render(system, BatchJob(), ("python", "train.py")))
    variables = {"CODE": str(code), "FIRST": signals, "STATE": state, "SLURM_JOB_ID": "17"}
    variables |= {"PBS_O_WORKDIR": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "job.sh"], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as process:
        if signals:
            while not (folder / "ready").exists() and process.poll() is None:
                time.sleep(0.01)
            # coreutils' timeout, if stopped before it has noted its child's number and waits, leaves it behind.
            ours = [each for each in psutil.Process(process.pid).children(recursive=True) if each.name() == "timeout"]
            wait_until(lambda: all(each.status() == psutil.STATUS_SLEEPING for each in ours))
            for name in signals.split():
                process.send_signal(signal.Signals[f"SIG{name}"])
        output, _ = extended(lambda seconds: process.communicate(timeout=seconds))
    where = "-H tuolumne1:1,tuolumne2:1 " if system == "flux" else ""
    assert (folder / "words").read_text() == f"run {where}-- python train.py\n"
    return process.returncode, output


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("code", [0, 1, 137])
def test_script_exits_as_the_launcher_does(system: System, code: int, stand_ins: Path) -> None:
    assert run_script(system, stand_ins, code) == (code, "")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("signals", ["USR1", "TERM"])
def test_signals_reach_the_launcher_and_its_code_is_waited_for(system: System, signals: str, stand_ins: Path) -> None:
    assert run_script(system, stand_ins, 9, signals) == (9, "")
    assert (stand_ins / "got").read_text() == f"{signals}\n"


def test_slurm_requeues_a_stopped_job_unless_it_was_cancelled(stand_ins: Path) -> None:
    assert run_script("slurm", stand_ins, 75, "USR1") == (75, "requeue 17\n")
    assert run_script("slurm", stand_ins, 75) == (75, "requeue 17\n")
    assert run_script("slurm", stand_ins, 75, state="CANCELLED") == (75, "")


def test_lsf_queues_no_cancelled_job_again(stand_ins: Path) -> None:
    assert run_script("lsf", stand_ins, 75, "USR1") == (75, "")
    for name in ("got", "ready"):
        (stand_ins / name).unlink()
    assert run_script("lsf", stand_ins, 75, "TERM") == (143, "")


def test_cpus_of_flux_are_those_of_its_nodes() -> None:
    with pytest.raises(ConfigError, match="remove --cpus-per-worker"):
        render("flux", GPUS, TRAIN)


def test_pbs_gets_its_signal_from_timeout(stand_ins: Path) -> None:
    text = render("pbs", BatchJob(), ("python", "train.py"))
    assert "--signal=USR1 3480 " in text
    variables = {"CODE": "75", "FIRST": "yes", "PBS_O_WORKDIR": str(stand_ins)}
    variables["PATH"] = f"{stand_ins}/bin:{os.environ['PATH']}"
    (stand_ins / "job.sh").write_text(text.replace(" 3480 ", " 3 "))
    assert subprocess.run(["bash", "job.sh"], cwd=stand_ins, env=variables, timeout=20, check=False).returncode == 75
    assert (stand_ins / "got").read_text() == "USR1\n"


def test_the_warning_comes_before_the_end_of_a_short_job() -> None:
    assert (BatchJob(time="2-01:00:10").seconds, BatchJob(time="2-01:00:10").warning_seconds) == (176410, 120)
    assert BatchJob(time="00:08:00").warning_seconds == 120
    assert BatchJob(time="00:04:00").warning_seconds == 60
    assert BatchJob(time="00:00:01").warning_seconds == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        *(
            ({"time": time}, rf"--time '{time}': must be \[D-\]HH:MM:SS")
            for time in ("", "60", "10:00", "01:60:00", "1:00:61", "00:00:00", "0-00:00:00", "1 day")
        ),
        ({"nodes": 0}, "--nodes 0: must be at least 1"),
        ({"workers": 0}, "-np 0: must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1: must be at least 0"),
        ({"cpus_per_worker": 0}, "--cpus-per-worker 0: must be at least 1"),
        ({"name": "a b"}, "--name .*: must be one word"),
        ({"name": "a\n#SBATCH --x"}, "--name .*: must be one word"),
        ({"name": "a/b"}, "--name a/b: must be without /, as it also names the output file"),
        ({"name": ""}, "--name .*: must be one word"),
        ({"account": "$x"}, "--account .*: must be one word"),
        ({"queue": "-q"}, "--queue .*: must be one word"),
        ({"nodes": 2, "workers": 3}, "-np 3 cannot be divided equally among 2 nodes"),
        ({"gpus_per_node": 4, "workers": 2}, "2 workers and 4 GPUs per node"),
        ({"gpus_per_node": 1, "workers": 2}, "2 workers and 1 GPUs? per node"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchJob(**flags)


if __name__ == "__main__":
    for name, case in CASES.items():
        (GOLDEN / f"{name}.sh").write_text(render(*case))
