"""A worker's rank info, read from its launcher's environment variables. Only this module reads RANK and similar.

There is one row per launcher. Launchers nest (torchrun in a Slurm step, mpirun in a batch job), so the rows are ordered
from the innermost: torchrun, then `OTHERS`. The first one found decides. docs/reference/launchers.md lists how each is
recognized and the sources of the names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.diagnosis import NODE
from lockstep.errors import WorldError
from lockstep.files.output import say
from lockstep.world import LOSS, NODE_PROCESS, RESTART_COUNT, SNAPSHOTS
from lockstep.world.slurm_hostlist import counts

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
HOROVOD_ADDRESS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
# Slurm numbers users' steps from 0; batch scripts, interactive shells and similar are numbered from here.
SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets for its workers. Of several names for one field, the first that is set counts.

    Args:
        local_size: A number or, from Slurm, the numbers of all nodes, such as "4(x2),3". From Flux,
            the number of nodes.
        node: Empty if the launcher does not number the nodes; they are then assumed to be filled in turn.
        marks: Variables that identify its workers: all of them are set.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    node: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[tuple[str, ...], ...]:
        return (self.rank, self.size, self.local_rank, self.local_size, *([self.node] if self.node else []))

    def has_started(self, environment: Mapping[str, str]) -> bool:
        """Whether this launcher's variables are set."""
        return all(name in environment for name in self.marks or self.rank[:1])


def _row(name: str, *fields: str, marks: str = "") -> Launcher:
    rank, size, local_rank, local_size, *node = (tuple(field.split("|")) for field in fields)
    return Launcher(name, rank, size, local_rank, local_size, node[0] if node else (), tuple(marks.split()))


TORCHRUN = _row("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
TORCHRUN_NAMES = tuple(names[0] for names in TORCHRUN.fields)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = _row(
    "Slurm",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    marks="SLURM_PROCID SLURM_STEP_ID",
)
FLUX = _row("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
MPI = (
    _row(
        "PALS",
        *("PALS_RANKID|PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID|PMI_LOCAL_RANK"),
        *("PMI_LOCAL_SIZE|PALS_LOCAL_SIZE", "PALS_NODEID"),
    ),
    _row("Open MPI", *(f"OMPI_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _row("MPICH", *_HYDRA, marks="PMI_RANK MPI_LOCALRANKID"),  # Slurm's `srun --mpi=pmi2` sets PMI_RANK too
)
MPICH_IN_PART = _row("MPICH", *_HYDRA)  # only for the error
_HOROVOD = tuple(f"HOROVOD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HOROVOD = _row("Horovod", *_HOROVOD, f"{NODE}|HOROVOD_CROSS_RANK")
OTHERS = (
    HOROVOD,
    *MPI,
    FLUX,  # which sets PMI_RANK and PMI_SIZE too
    SLURM,
    MPICH_IN_PART,
)
# A Kubernetes training operator starts one worker per pod, so the rank is also the node's index.
KUBEFLOW = "Kubeflow"
KUBEFLOW_VARIABLES = ("RANK", "WORLD_SIZE", *ADDRESS)
# A TrainJob's pods have only torchrun's flags; a single pod may start workers itself.
TRAIN_JOB_ADDRESS = ("PET_MASTER_ADDR", "PET_MASTER_PORT")
TRAIN_JOB_VARIABLES = ("PET_NODE_RANK", "PET_NNODES", *TRAIN_JOB_ADDRESS)
WORKERS_A_POD = "PET_NPROC_PER_NODE"  # for torchrun; a number or auto, cpu, gpu
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in every container of a cluster
PMIX_RANK = "PMIX_RANK"  # set by prterun and `srun --mpi=pmix`, which set the number of workers in other variables
MVAPICH2_SIZE = "MV2_COMM_WORLD_SIZE"  # of an MPI that has no row here
_warnings = set[str]()  # already printed


@dataclass(frozen=True)
class RankInfo:
    """A worker's rank info.

    `rank` of `size` workers in total; `local_rank` of `local_size` on this node; `node` is the node's index from 0. A
    worker that stays when others are lost keeps its `local_rank`, which may then be `local_size` or more.
    `restart` is how often torchrun or Lockstep's launcher restarted the job's workers. `snapshots` is the folder in
    this host's memory that outlives them, if any. `loss` says how their previous generation ended, at the Unix time
    `loss_time`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    launcher: str = "none"
    restart: int = field(default=0, repr=False)
    snapshots: Path | None = field(default=None, repr=False)
    loss: str = field(default="", repr=False)
    loss_time: float = field(default=0.0, repr=False)

    @property
    def is_of_mpi(self) -> bool:
        """Whether an MPI launcher started this worker, so that an MPI library finds its peers."""
        return self.launcher in {row.name for row in MPI}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankInfo:
        """Read this worker's rank info from the variables of the launcher that started it.

        Warn, once per process, if another launcher's variables show that this worker may belong to a larger job.

        Raises:
            WorldError: The variables are incomplete or contradict each other.
        """
        rank_info = cls._from_innermost(environment)
        _check_others(rank_info, environment)
        return rank_info

    @classmethod
    def _from_innermost(cls, environment: Mapping[str, str]) -> RankInfo:
        other = next((launcher for launcher in OTHERS if _has_started(launcher, environment)), None)
        if TORCHRUN_ID in environment:
            return _read_torchrun(environment)
        if other is HOROVOD and NODE in environment:  # scripts may set RANK for themselves
            return _read(HOROVOD, environment)
        if "RANK" in environment and not _is_kubeflow(environment):
            return _agreed(_read(other, environment), other, environment) if other else _read_torchrun(environment)
        if other:
            return _read(other, environment)
        if "RANK" in environment:
            return _read_kubeflow(environment, KUBEFLOW_VARIABLES)
        return _read_kubeflow(environment, TRAIN_JOB_VARIABLES) if _is_train_job(environment) else cls()


def _has_started(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    if not launcher.has_started(environment):
        return False
    if launcher is FLUX:  # a single task may start workers itself
        return environment.get("FLUX_JOB_SIZE") != "1"
    if launcher is MPICH_IN_PART:
        return not FLUX.has_started(environment)
    return launcher is not SLURM or _is_slurm_task(environment)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of a step. A single task is not a worker: it may start workers itself."""
    step = environment["SLURM_STEP_ID"]
    if (step.isdecimal() and int(step) >= SLURM_SPECIAL_STEPS) or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return False
    # Tasks of such a shell's step inherit SLURM_PTY_PORT, but only the shell has a terminal.
    is_typed = environment.get("SLURM_TASK_PID") != str(os.getpid()) and os.isatty(0)
    if "SLURM_PTY_PORT" in environment and is_typed:
        raise WorldError(
            f"this shell is one of {environment.get('SLURM_STEP_NUM_TASKS')} tasks of a Slurm step (srun --pty -n); "
            f"start the job with `srun --overlap python ...`, or only this process with "
            f"`env -u SLURM_STEP_ID python ...`"
        )
    return True


def _check_others(rank_info: RankInfo, environment: Mapping[str, str]) -> None:
    """Check that one worker of a larger job is not mistaken for a whole job.

    Raises:
        WorldError: Two MPI launchers disagree, so one's variables are stale, or only a rank is known.
    """
    for launcher in OTHERS:
        names = _names(launcher, environment)
        values = [environment.get(name, "") for name in names[:2]]
        if launcher.name == rank_info.launcher or not _has_started(launcher, environment) or not values[1].isdecimal():
            continue
        shown = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=False))
        if rank_info.is_of_mpi and launcher in MPI and values != [str(rank_info.rank), str(rank_info.size)]:
            own = next(row for row in MPI if row.name == rank_info.launcher)
            raise WorldError(
                f"{rank_info.launcher}'s variables set worker {rank_info.rank} of {rank_info.size}, "
                f"but {launcher.name}'s set {shown}; unset those of the outer job: "
                f"unset {' '.join(_names(own, environment))}, "
                f"or unset {' '.join(name for name in names if name in environment)}"
            )
        if int(values[1]) > rank_info.size:
            _warn(
                f"{rank_info.launcher}'s variables make this worker rank {rank_info.rank} of {rank_info.size}, "
                f"but {launcher.name} set {shown}; if {launcher.name} started this worker, unset "
                f"{rank_info.launcher}'s variables, which are left over from an outer job"
            )
    if rank_info.launcher == "none" and environment.get(MVAPICH2_SIZE, "1") != "1":
        raise WorldError(
            f"{MVAPICH2_SIZE}={environment[MVAPICH2_SIZE]}: MVAPICH2 started this worker, which would run alone; start "
            f"the workers with Open MPI, MPICH, srun or `lockstep run`"
        )
    if rank_info.launcher == "none" and PMIX_RANK in environment and "SLURM_STEP_ID" not in environment:
        found = f"{PMIX_RANK}={environment[PMIX_RANK]} is set, but not the number of workers"
        fix = "start the workers with mpirun, srun, torchrun or `lockstep run`"
        if environment[PMIX_RANK] != "0":
            raise WorldError(f"{found}: this worker would run alone; {fix}")
        _warn(f"{found}: this worker runs alone; if it should be one of several, {fix}")


def _warn(text: str) -> None:
    if text not in _warnings:
        _warnings.add(text)
        say(f"lockstep: warning: {text}")


def _is_kubeflow(environment: Mapping[str, str]) -> bool:
    """Whether a Kubernetes training operator set RANK: in a pod, with an address and without torchrun's variables."""
    has_all = all(name in environment for name in (KUBERNETES, *KUBEFLOW_VARIABLES))
    return has_all and not any(name in environment for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))


def _is_train_job(environment: Mapping[str, str]) -> bool:
    has_all = all(name in environment for name in (KUBERNETES, *TRAIN_JOB_VARIABLES))
    return has_all and environment["PET_NNODES"] != "1"


def _read_kubeflow(environment: Mapping[str, str], names: tuple[str, ...]) -> RankInfo:
    if environment.get(WORKERS_A_POD, "").isdecimal() and environment[WORKERS_A_POD] != "1":
        raise WorldError(
            f"{WORKERS_A_POD}={environment[WORKERS_A_POD]}: the operator expects several workers per pod "
            f"(nprocPerNode), but this process is one; start them with torchrun: "
            f"command: [torchrun, -m, lockstep, train, ...]"
        )
    rank, size = _numbers(KUBEFLOW, {name: environment[name] for name in names[:2]})
    _check(KUBEFLOW, {name: environment[name] for name in names}, 0 <= rank < size)
    return RankInfo(rank, size, 0, 1, rank, KUBEFLOW)


def _read_torchrun(environment: Mapping[str, str]) -> RankInfo:
    variables = (*TORCHRUN_NAMES, *ADDRESS)
    present = [name for name in (TORCHRUN_ID, *variables) if name in environment]
    if missing := [name for name in variables if name not in environment]:
        raise WorldError(
            f"torchrun's variables are incomplete: {', '.join(present)} set, {', '.join(missing)} not set; start "
            f"the job with torchrun or `lockstep train -np N`, or, if they are left from an earlier job, "
            f"unset {' '.join(present)}"
        )
    return _read(TORCHRUN, environment)


def _agreed(rank_info: RankInfo, launcher: Launcher, environment: Mapping[str, str]) -> RankInfo:
    """Check a RANK that torchrun did not set, such as a script's copy or a stale one, against the launcher's info."""
    right = {"RANK": rank_info.rank, "WORLD_SIZE": rank_info.size, "LOCAL_RANK": rank_info.local_rank}
    wrong = [
        f"{name}={environment[name]}" for name in right if environment.get(name, str(right[name])) != str(right[name])
    ]
    if wrong:
        left = [name for name in TORCHRUN_NAMES if name in environment]
        raise WorldError(
            f"{', '.join(wrong)} contradicts {launcher.name}, which started this worker as {rank_info.rank} of "
            f"{rank_info.size} "
            f"({', '.join(f'{name}={environment[name]}' for name in _names(launcher, environment)[:3])}); "
            f"torchrun did not start this worker ({TORCHRUN_ID} is not set), so these variables are left over from an "
            f"earlier job: unset {' '.join(left)}"
        )
    return rank_info


def _read(launcher: Launcher, environment: Mapping[str, str]) -> RankInfo:
    """Read the rank info from a launcher's variables."""
    names = _names(launcher, environment)
    if missing := [name for name in names if name not in environment]:
        present = [name for name in names if name in environment]
        raise WorldError(
            f"{launcher.name}'s variables are incomplete: {', '.join(present)} set, {', '.join(missing)} not set; "
            f"restart the job, or set all of torchrun's: {' '.join((*TORCHRUN_NAMES, *ADDRESS))}"
        )
    shown = {name: environment[name] for name in names}
    rank_info = replace(_place(launcher, shown), launcher=launcher.name)
    rank, size, local_rank, local_size = rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size
    consistent = 0 <= rank < size and 0 < local_size <= size and local_rank >= 0
    if NODE_PROCESS not in environment:  # else a worker that stays keeps its local rank, and with it its device
        consistent = consistent and local_rank < local_size and local_rank <= rank
    _check(launcher.name, shown, consistent and rank_info.node >= 0)
    if launcher is not TORCHRUN and NODE not in environment:
        return rank_info
    restart, snapshots = environment.get(RESTART_COUNT, "0"), environment.get(SNAPSHOTS)
    when, _, loss = environment.get(LOSS, "0 ").partition(" ")
    return replace(
        rank_info,
        restart=int(restart) if restart.isdecimal() else 0,
        snapshots=Path(snapshots) if snapshots else None,
        loss=loss,
        loss_time=float(when),
    )


def _place(launcher: Launcher, shown: Mapping[str, str]) -> RankInfo:
    if launcher is not SLURM:
        rank, size, local_rank, local_size, *node = _numbers(launcher.name, shown)
        if launcher is FLUX:
            local_size = _equal_share(size, nodes=local_size)
        return RankInfo(rank, size, local_rank, local_size, node[0] if node else rank // max(1, local_size))
    *_, tasks, _ = shown
    rank, size, local_rank, node_index = _numbers(launcher.name, {k: v for k, v in shown.items() if k != tasks})
    try:
        local_sizes = counts(shown[tasks])
    except ValueError as error:
        raise WorldError(f"invalid Slurm variable {tasks}: {error}") from None
    _check(launcher.name, shown, 0 <= node_index < len(local_sizes) and sum(local_sizes) == size)
    return RankInfo(rank, size, local_rank, local_sizes[node_index], node_index)


def _equal_share(size: int, nodes: int) -> int:
    """Return the tasks of each node of a Flux job, which are the same for all: Flux sets only their total."""
    if nodes < 1 or size % nodes:
        raise WorldError(
            f"Flux started {size} workers on {nodes} nodes, and does not set how many are on each; start as many on "
            f"each node: flux run --nodes=N --tasks-per-node=M python ..."
        )
    return size // nodes


def _numbers(launcher: str, shown: Mapping[str, str]) -> list[int]:
    try:
        return [int(value) for value in shown.values()]
    except ValueError:
        text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        raise WorldError(f"{launcher}'s variables must be integers: {text}") from None


def _check(launcher: str, shown: Mapping[str, str], consistent: bool) -> None:
    if not consistent:
        text = ", ".join(f"{name}={value}" for name, value in shown.items())
        raise WorldError(f"{launcher}'s variables contradict each other: {text}")


def _names(launcher: Launcher, environment: Mapping[str, str]) -> list[str]:
    """The names in effect, in the order of `RankInfo`'s fields."""
    return [next((name for name in names if name in environment), names[0]) for names in launcher.fields]
