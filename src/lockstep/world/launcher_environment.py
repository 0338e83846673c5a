"""A worker's place among its peers, as its launcher says: only here it is concluded from RANK and its like.

One row a launcher. Launchers nest (torchrun in a Slurm step, mpirun in a batch job), so the rows stand innermost first:
torchrun, then `OTHERS`; the first one that is there decides. docs/reference/launchers.md says how each is recognised,
and where the names come from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import WorldError
from lockstep.world.slurm_hostlist import counts

# Where rank 0 is, and what marks torchrun's own workers.
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
SNAPSHOTS = "LOCKSTEP_SNAPSHOTS"  # from our own launcher, where the workers may be restarted
# Slurm numbers the steps of users from 0; the batch script, interactive shells and the like have numbers from here on.
SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher gives its workers; of several names for one thing the first that is set counts.

    Args:
        local_size: A number or, from Slurm, the numbers of all nodes, such as "4(x2),3".
        node: Empty where the launcher does not number the nodes: they are then taken to be filled in turn.
        marks: By which its workers are known: all of them are set.
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
        """Whether its variables are there."""
        return all(name in environment for name in self.marks or self.rank[:1])


def _row(name: str, *fields: str, marks: str = "") -> Launcher:
    rank, size, local_rank, local_size, *node = (tuple(field.split("|")) for field in fields)
    return Launcher(name, rank, size, local_rank, local_size, node[0] if node else (), tuple(marks.split()))


TORCHRUN = _row("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = _row(
    "Slurm",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    marks="SLURM_PROCID SLURM_STEP_ID",
)
MPI = (
    _row(
        "PALS",
        *("PALS_RANKID|PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID|PMI_LOCAL_RANK"),
        *("PMI_LOCAL_SIZE|PALS_LOCAL_SIZE", "PALS_NODEID"),
    ),
    _row("jsrun", *(f"JSM_NAMESPACE_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _row("Open MPI", *(f"OMPI_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _row("MVAPICH2", *(f"MV2_COMM_WORLD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _row("MPICH", *_HYDRA, marks="PMI_RANK MPI_LOCALRANKID"),  # Slurm's `srun --mpi=pmi2` sets PMI_RANK too
)
OTHERS = (
    _row("Horovod", *(f"HOROVOD_{field}" for field in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"))),
    *MPI,
    SLURM,
    _row("MPICH", *_HYDRA),  # incomplete: only to say so
)
# A Kubernetes training operator starts one worker a pod, so the ranks count the nodes as well.
KUBEFLOW = "Kubeflow"
KUBEFLOW_VARIABLES = ("RANK", "WORLD_SIZE", *ADDRESS)
WORKERS_A_POD = "PET_NPROC_PER_NODE"  # for torchrun; a number or auto, cpu, gpu
KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in every container of a cluster
PMIX_RANK = "PMIX_RANK"  # set by prterun and `srun --mpi=pmix`, beside which others say how many workers there are
_warnings = set[str]()  # given already


@dataclass(frozen=True)
class Place:
    """A worker's place among its peers.

    `rank` of `size` workers in all; `local_rank` of `local_size` on this node; `node` counts the nodes from 0. In
    an elastic job `local_rank` is the worker's slot on its host, which may be `local_size` or more.
    `restart` counts the times that torchrun, or Lockstep's launcher, has started the job's workers anew; `snapshots` is
    the folder in this host's memory that outlives them, if there is one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    launcher: str = "none"
    restart: int = field(default=0, repr=False)
    snapshots: Path | None = field(default=None, repr=False)

    @property
    def is_of_mpi(self) -> bool:
        """Whether MPI's own launcher has started this worker, so that a library of MPI finds its peers."""
        return self.launcher in {row.name for row in MPI}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read this worker's place from the variables of the launcher that started it.

        Warn, once a process, where another launcher's variables show that this worker may belong to a larger job.

        Raises:
            WorldError: The variables are incomplete or contradict each other.
        """
        place = cls._from_innermost(environment)
        _check_others(place, environment)
        return place

    @classmethod
    def _from_innermost(cls, environment: Mapping[str, str]) -> Place:
        other = next((launcher for launcher in OTHERS if _has_started(launcher, environment)), None)
        if TORCHRUN_ID in environment:
            return _read_torchrun(environment)
        if "RANK" in environment and not _is_kubeflow(environment):
            return _agreed(_read(other, environment), other, environment) if other else _read_torchrun(environment)
        if other:
            return _read(other, environment)
        return _read_kubeflow(environment) if "RANK" in environment else cls()


def _has_started(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    return launcher.has_started(environment) and (launcher is not SLURM or _is_slurm_task(environment))


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of a step: a single one stands alone, and may start workers itself."""
    step = environment["SLURM_STEP_ID"]
    if (step.isdecimal() and int(step) >= SLURM_SPECIAL_STEPS) or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return False
    # Tasks within such a shell's step inherit SLURM_PTY_PORT, but a terminal has the shell alone.
    is_typed = environment.get("SLURM_TASK_PID") != str(os.getpid()) and os.isatty(0)
    if "SLURM_PTY_PORT" in environment and is_typed:
        raise WorldError(
            f"the shell of this terminal is one task of {environment.get('SLURM_STEP_NUM_TASKS')} of a Slurm step "
            f"(srun --pty -n); start the job from it with `srun --overlap python ...`, or this process alone with "
            f"`env -u SLURM_STEP_ID python ...`"
        )
    return True


def _check_others(place: Place, environment: Mapping[str, str]) -> None:
    """See that a worker of a job is not taken for a job of its own.

    Raises:
        WorldError: Two launchers of MPI disagree, so one has left its variables behind, or only a rank is known.
    """
    for launcher in OTHERS:
        names = _names(launcher, environment)
        values = [environment.get(name, "") for name in names[:2]]
        if launcher.name == place.launcher or not _has_started(launcher, environment) or not values[1].isdecimal():
            continue
        shown = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=False))
        if place.is_of_mpi and launcher in MPI and values != [str(place.rank), str(place.size)]:
            own = next(row for row in MPI if row.name == place.launcher)
            raise WorldError(
                f"{place.launcher}'s variables say worker {place.rank} of {place.size}, {launcher.name}'s say {shown}; "
                f"unset those that an outer job left behind: unset {' '.join(_names(own, environment))}, or "
                f"unset {' '.join(name for name in names if name in environment)}"
            )
        if int(values[1]) > place.size:
            own_job = f"a job of {place.size} by {place.launcher}'s variables"
            _warn(
                f"this worker is rank {place.rank} of {own_job}, but {launcher.name} has set {shown}; if they are one "
                f"job, unset {place.launcher}'s variables, which an outer job left behind"
            )
    if place.launcher == "none" and PMIX_RANK in environment and "SLURM_STEP_ID" not in environment:
        said = f"{PMIX_RANK}={environment[PMIX_RANK]}, and no launcher's number of workers is set"
        fix = "start the workers with mpirun, srun, torchrun or `lockstep run`"
        if environment[PMIX_RANK] != "0":
            raise WorldError(f"{said}: this worker would be a job of its own; {fix}")
        _warn(f"{said}: this worker is a job of its own; if it should be one of several, {fix}")


def _warn(text: str) -> None:
    if text not in _warnings:
        _warnings.add(text)
        print(f"lockstep: warning: {text}", file=sys.stderr, flush=True)


def _is_kubeflow(environment: Mapping[str, str]) -> bool:
    """Whether a Kubernetes training operator has set RANK: in a pod, with an address and with nothing of torchrun's."""
    has_all = all(name in environment for name in (KUBERNETES, *KUBEFLOW_VARIABLES))
    return has_all and not any(name in environment for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))


def _read_kubeflow(environment: Mapping[str, str]) -> Place:
    if environment.get(WORKERS_A_POD, "").isdecimal() and environment[WORKERS_A_POD] != "1":
        raise WorldError(
            f"{WORKERS_A_POD}={environment[WORKERS_A_POD]}: the operator counts several workers a pod (nprocPerNode), "
            f"but this is one; have torchrun start them: command: [torchrun, -m, lockstep, train, ...]"
        )
    rank, size = _numbers(KUBEFLOW, {name: environment[name] for name in ("RANK", "WORLD_SIZE")})
    _check(KUBEFLOW, {name: environment[name] for name in KUBEFLOW_VARIABLES}, 0 <= rank < size)
    return Place(rank, size, 0, 1, rank, KUBEFLOW)


def _read_torchrun(environment: Mapping[str, str]) -> Place:
    variables = (*_first_names(TORCHRUN), *ADDRESS)
    present = [name for name in (TORCHRUN_ID, *variables) if name in environment]
    if missing := [name for name in variables if name not in environment]:
        raise WorldError(
            f"torchrun's variables are incomplete: {', '.join(present)} set, {', '.join(missing)} not set; start "
            f"the job with torchrun or `lockstep train -np N`, or unset what an earlier job left behind: "
            f"unset {' '.join(present)}"
        )
    place, restart = _read(TORCHRUN, environment), environment.get(RESTART_COUNT, "0")
    snapshots = Path(environment[SNAPSHOTS]) if SNAPSHOTS in environment else None
    return replace(place, restart=int(restart) if restart.isdecimal() else 0, snapshots=snapshots)


def _agreed(place: Place, launcher: Launcher, environment: Mapping[str, str]) -> Place:
    """A launcher's word, beside a RANK that is not torchrun's: a script's copy of it, or an earlier job's left-over."""
    said = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    wrong = [
        f"{name}={environment[name]}" for name in said if environment.get(name, str(said[name])) != str(said[name])
    ]
    if wrong:
        left = [name for name in _first_names(TORCHRUN) if name in environment]
        raise WorldError(
            f"{', '.join(wrong)} cannot be: {launcher.name} has started this as worker {place.rank} of {place.size} "
            f"({', '.join(f'{name}={environment[name]}' for name in _names(launcher, environment)[:3])}), and no "
            f"torchrun is there ({TORCHRUN_ID} not set); unset what an earlier job left behind: unset {' '.join(left)}"
        )
    return place


def _read(launcher: Launcher, environment: Mapping[str, str]) -> Place:
    """The place that a launcher's variables say."""
    names = _names(launcher, environment)
    if missing := [name for name in names if name not in environment]:
        present = [name for name in names if name in environment]
        raise WorldError(
            f"{launcher.name}'s variables are incomplete: {', '.join(present)} set, {', '.join(missing)} not set; "
            f"start the job anew, or set all of torchrun's: {' '.join((*_first_names(TORCHRUN), *ADDRESS))}"
        )
    shown = {name: environment[name] for name in names}
    place = replace(_place(launcher, shown), launcher=launcher.name)
    rank, size, local_rank, local_size = place.rank, place.size, place.local_rank, place.local_size
    consistent = 0 <= rank < size and 0 <= local_rank < local_size <= size and local_rank <= rank
    _check(launcher.name, shown, consistent and place.node >= 0)
    return place


def _place(launcher: Launcher, shown: Mapping[str, str]) -> Place:
    if launcher is not SLURM:
        rank, size, local_rank, local_size, *node = _numbers(launcher.name, shown)
        return Place(rank, size, local_rank, local_size, node[0] if node else rank // max(1, local_size))
    *_, tasks, _ = shown
    rank, size, local_rank, node_index = _numbers(launcher.name, {k: v for k, v in shown.items() if k != tasks})
    try:
        local_sizes = counts(shown[tasks])
    except ValueError as error:
        raise WorldError(f"Slurm's variable {tasks} cannot be read: {error}") from None
    _check(launcher.name, shown, 0 <= node_index < len(local_sizes) and sum(local_sizes) == size)
    return Place(rank, size, local_rank, local_sizes[node_index], node_index)


def _numbers(launcher: str, shown: Mapping[str, str]) -> list[int]:
    try:
        return [int(value) for value in shown.values()]
    except ValueError:
        text = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        raise WorldError(f"{launcher}'s variables must be whole numbers: {text}") from None


def _check(launcher: str, shown: Mapping[str, str], consistent: bool) -> None:
    if not consistent:
        text = ", ".join(f"{name}={value}" for name, value in shown.items())
        raise WorldError(f"{launcher}'s variables contradict each other: {text}")


def _names(launcher: Launcher, environment: Mapping[str, str]) -> list[str]:
    """The names that count, in the order of `Place`'s fields."""
    return [next((name for name in names if name in environment), names[0]) for names in launcher.fields]


def _first_names(launcher: Launcher) -> list[str]:
    return [names[0] for names in launcher.fields]
