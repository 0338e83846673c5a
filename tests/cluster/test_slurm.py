"""Jobs of a real, small Slurm: batch scripts, time limits, and workers that srun starts."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import of_one_thread, run
from runs import final_weights
from slurm import Slurm, slurm_cluster, why_not
from time_limits import wait_until

from lockstep.launch.plan.batch_script import BatchJob, render

pytestmark = pytest.mark.cold  # on hosts of their own


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_its_end_leaves_no_process_behind(tmp_path: Path) -> None:
    before = set(psutil.pids())
    with slurm_cluster(tmp_path) as slurm:
        slurm.sbatch("#!/bin/sh\nsetsid sleep 1000 > /dev/null 2>&1 &\nsleep 0.1\n")
        assert {"slurmctld", "slurmd", "munged"} <= names(before)
    assert not {"slurmctld", "slurmd", "munged", "sleep 1000"} & names(before)


def names(before: set[int]) -> set[str]:
    """Of the processes since then, some of which other tests may have started: programs, and a call of sleep whole."""
    found = [process.info for process in psutil.process_iter(["pid", "name", "cmdline"])]
    new = [each for each in found if each["pid"] not in before]
    return {" ".join(each["cmdline"] or ()) if each["name"] == "sleep" else each["name"] for each in new}


JOB = BatchJob(nodes=2, workers=4, cpus_per_worker=1, time="00:20:00")
# Ends with 75 after a signal, as a launcher whose workers have written a checkpoint; the second time it ends well.
LAUNCHER = """#!/bin/bash
trap 'stopped=yes' USR1 TERM
echo "started with $*"
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
while [ -z "$stopped" ]; do sleep 0.1; done
exit 75
"""


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Submits a script whose launcher is a stand-in, from a folder of its own: the job's number, once it runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lockstep").write_text(LAUNCHER)
    (tmp_path / "bin" / "lockstep").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(render("slurm", JOB, ("python", "train.py")))

    def start(*options: str) -> str:
        path = f"{tmp_path}/bin:{slurm.environment()['PATH']}"
        job = slurm.run(["sbatch", "--parsable", *options, "job.sh"], PATH=path).stdout.strip()
        if "--test-only" not in options:
            wait_until(lambda: "started" in output(tmp_path, job))
        return job

    return start


def output(folder: Path, job: str) -> str:
    file = folder / f"lockstep-{job}.out"
    return file.read_text() if file.exists() else ""


def test_slurm_takes_the_script(slurm: Slurm, submit: Callable[..., str]) -> None:
    submit("--test-only")
    golden = Path(__file__).parents[1] / "single" / "launch" / "plan" / "golden" / "slurm-cpus.sh"
    taken = slurm.run(["sbatch", "--test-only", str(golden)]).stderr
    assert "using 8 processors" in taken


def test_stopped_job_is_requeued_and_appends_to_the_same_file(
    slurm: Slurm, submit: Callable[..., str], tmp_path: Path
) -> None:
    job = submit()
    slurm.run(["scancel", "--batch", "--signal=USR1", job])  # as --signal=B:USR1@120 ahead of the time limit
    wait_until(lambda: slurm.facts(job)["Restarts"] == "1" and slurm.facts(job)["JobState"] == "PENDING")
    # Slurm itself waits two minutes; within the second of its end, a node takes the job for one already killed.
    slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"])
    wait_until(lambda: slurm.facts(job)["JobState"] == "COMPLETED", pause=0.1)
    assert output(tmp_path, job).count("started with run -- python train.py\n") == 2
    slurm.wait_until_idle()


def test_a_cancelled_job_is_not_queued_again(slurm: Slurm, submit: Callable[..., str]) -> None:
    job = submit()
    slurm.run(["scancel", job])
    slurm.wait_until_idle()
    found = slurm.facts(job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


def test_a_preempted_job_is_queued_again(slurm: Slurm, submit: Callable[..., str]) -> None:
    job = submit()
    slurm.sbatch("#!/bin/sh\n", "--partition=urgent", "--nodes=2", "--exclusive")
    assert slurm.facts(job)["Restarts"] == "1"
    slurm.run(["scancel", job])
    slurm.wait_until_idle()


ASK = "import os; from lockstep.world.batch_job import time_left; print(time_left(os.environ).seconds)"
SCRIPT = f"""#!/bin/sh
echo $(({"${SLURM_JOB_END_TIME:-0}"} - $(date +%s)))
{sys.executable} -c '{ASK}'
"""


def test_a_job_learns_its_time_limit(slurm: Slurm) -> None:
    by_environment, told = map(float, slurm.sbatch(SCRIPT, "--time=0:10:00").split())
    assert 590 < told <= 600
    assert by_environment < 0 or abs(by_environment - told) <= 2  # Slurm 22.05 gives no SLURM_JOB_END_TIME


PLACE = [
    sys.executable,
    "-c",
    "from lockstep.world.launcher_environment import RankInfo; print(RankInfo.from_environment())",
]
WORLD = """
import os, socket, torch
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect
own = RankInfo.from_environment()
with connect(own, "cpu") as world:
    total = world.sum_(torch.tensor([world.rank + 1.0])).item()
    said = [own.launcher, world.rank, own.local_rank, socket.gethostname(), os.environ["GLOO_SOCKET_IFNAME"], total]
    everyone = world.gather(said)
if world.is_main:
    print(everyone)
"""
HOROVOD = """
import torch
import lockstep.hvd as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
print([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total])
"""


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def _places(printed: str) -> list[str]:
    return sorted(re.findall(r"RankInfo\(.*?\)", printed))


def test_a_step_on_two_nodes_meets_and_adds_up(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run(["srun", "-N2", "-n2", sys.executable, _script(tmp_path, WORLD + HOROVOD)])
    assert sorted(map(ast.literal_eval, done.stdout.splitlines()), key=str) == [
        [0, 2, 0, 1, 0, 2, 3.0],
        [1, 2, 0, 1, 1, 2, 3.0],
        [["Slurm", 0, 0, "hal01", "eth0", 3.0], ["Slurm", 1, 0, "hal02", "eth0", 3.0]],
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "mpirun"), [("Open MPI", "mpirun.openmpi --allow-run-as-root"), ("MPICH", "mpirun.mpich")]
)
def test_mpirun_in_a_job_on_two_nodes_meets_and_adds_up(
    launcher: str, mpirun: str, slurm: Slurm, tmp_path: Path
) -> None:
    command = f"#!/bin/sh\n{mpirun} -np 2 {sys.executable} {_script(tmp_path, WORLD)}\n"
    printed = slurm.sbatch(command, "-N2", "-n2", "--ntasks-per-node=1")
    assert ast.literal_eval(printed.splitlines()[-1]) == [
        [launcher, 0, 0, "hal01", "eth0", 3.0],
        [launcher, 1, 0, "hal02", "eth0", 3.0],
    ]


def test_batch_script_is_not_a_worker_but_its_uneven_steps_are(slurm: Slurm) -> None:
    python, _, code = PLACE
    one = f"{python} -c '{code}'"
    printed = slurm.sbatch(f"#!/bin/sh\n{one}\necho then\nsrun {one}\necho then\nsrun --mpi=pmi2 {one}\n", "-N2", "-n3")
    alone, plain, pmi2 = printed.split("then")
    assert _places(alone) == ["RankInfo(rank=0, size=1, local_rank=0, local_size=1, node=0, launcher='none')"]
    assert _places(plain) == [
        "RankInfo(rank=0, size=3, local_rank=0, local_size=2, node=0, launcher='Slurm')",
        "RankInfo(rank=1, size=3, local_rank=1, local_size=2, node=0, launcher='Slurm')",
        "RankInfo(rank=2, size=3, local_rank=0, local_size=1, node=1, launcher='Slurm')",
    ]
    assert _places(pmi2) == _places(plain)


def test_interactive_shells_are_no_workers(slurm: Slurm) -> None:
    python, _, code = PLACE

    def terminal(opening: str, before: str = "") -> str:
        """What a terminal shows when a shell that Slurm opens on a node runs PLACE."""
        shell = f"""{opening} sh -c '{before} {python} -c "{code}"; true'"""
        return slurm.run(["script", "-qec", shell, "/dev/null"], check=False).stdout.replace("\r", "")

    none = ["RankInfo(rank=0, size=1, local_rank=0, local_size=1, node=0, launcher='none')"]
    # What salloc itself runs (LaunchParameters=use_interactive_step).
    assert _places(terminal("salloc -N2 -n3 srun --interactive --preserve-env --pty")) == none
    assert _places(terminal("srun -N1 -n1 --pty")) == none
    shown = terminal("srun -N1 -n2 --pty")
    assert "this shell is one of 2 tasks of a Slurm step" in shown
    assert len(_places(terminal("srun -N1 -n1 -c2 --pty", before="srun --overlap -n2 -c1"))) == 2


@pytest.mark.long
def test_srun_and_lockstep_run_train_what_a_local_job_trains(slurm: Slurm, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "lockstep", "train", "digits", "--epochs", "1", "--device", "cpu", "--run-dir"]
    local = run([*train, tmp_path / "local", "-np", "2"], tmp_path, of_one_thread())
    assert "over 2 workers" in local.stdout, local.stderr
    slurm.run(["srun", "-N2", "-n2", *train, str(tmp_path / "srun")], OMP_NUM_THREADS="1")
    launch = [sys.executable, "-m", "lockstep", "run", "--log-dir", str(tmp_path / "logs"), "--"]
    slurm.run(["salloc", "-N2", *launch, *train, str(tmp_path / "run")], OMP_NUM_THREADS="1")
    weights = [final_weights(tmp_path / name) for name in ("local", "srun", "run")]
    assert weights[0] == weights[1] == weights[2]
