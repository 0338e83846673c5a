"""A worker's rank info, from the variables of its launcher."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lockstep.errors import WorldError
from lockstep.world.launcher_environment import RankInfo


def variables(text: str) -> dict[str, str]:
    """Variables as `env` prints them."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29500 "
    "TORCHELASTIC_RUN_ID=none"
)


def _without(name: str) -> dict[str, str]:
    return {key: value for key, value in TORCHRUN.items() if key != name}


# TorchDistributor starts one torchrun per task, as a node with one worker, in an environment with Spark's variables.
SPARK = variables(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 NODE_RANK=1 MASTER_ADDR=10.0.0.7 "
    "MASTER_PORT=41123 TORCHELASTIC_RUN_ID=5f0c6d4f7d6a4ee8b1d3c5f4a2b19e77 TORCHELASTIC_RESTART_COUNT=0 "
    "TORCHELASTIC_USE_AGENT_STORE=True SPARK_ENV_LOADED=1 CUDA_VISIBLE_DEVICES=3"
)
ONE_WORKER = variables("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0")


@pytest.mark.parametrize(
    ("environment", "rank_info"),
    [
        pytest.param({}, RankInfo(), id="nothing"),
        pytest.param({"PATH": "/bin", "OMP_NUM_THREADS": "1"}, RankInfo(0, 1, 0, 1, 0, "none"), id="other variables"),
        # Set in some clusters' login shells; without a rank they start nothing.
        pytest.param({"MASTER_ADDR": "node0", "WORLD_SIZE": "4"}, RankInfo(), id="no rank"),
        pytest.param(TORCHRUN, RankInfo(5, 8, 1, 4, 1, "torchrun"), id="torchrun"),
        pytest.param({**TORCHRUN, **ONE_WORKER}, RankInfo(0, 1, 0, 1, 0, "torchrun"), id="one worker"),
        pytest.param(_without("TORCHELASTIC_RUN_ID"), RankInfo(5, 8, 1, 4, 1, "torchrun"), id="no run id"),
        pytest.param(SPARK, RankInfo(1, 2, 0, 1, 1, "torchrun"), id="PySpark's TorchDistributor"),
    ],
)
def test_rank_info_matches_the_launchers_variables(environment: dict[str, str], rank_info: RankInfo) -> None:
    assert RankInfo.from_environment(environment) == rank_info


@pytest.mark.parametrize("missing", [name for name in TORCHRUN if name != "TORCHELASTIC_RUN_ID"])
def test_an_incomplete_set_of_variables_names_what_is_missing(missing: str) -> None:
    with pytest.raises(WorldError, match=rf", {missing} not set") as caught:
        RankInfo.from_environment(_without(missing))
    fix = str(caught.value).rpartition("unset ")[2]
    assert set(fix.split()) | {"TORCHELASTIC_RUN_ID"} == set(TORCHRUN) - {missing}


@pytest.mark.parametrize("left", ["RANK", "TORCHELASTIC_RUN_ID"])
def test_a_single_variable_left_behind_is_named(left: str) -> None:
    with pytest.raises(WorldError, match=rf"\b{left}\b.*unset {left}"):
        RankInfo.from_environment({left: "0"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
@pytest.mark.parametrize("value", ["", "first", "1.0", "0x1"])
def test_invalid_number_is_shown(name: str, value: str) -> None:
    with pytest.raises(WorldError, match=re.escape(f"{name}={value!r}")):
        RankInfo.from_environment({**TORCHRUN, name: value})


@pytest.mark.parametrize(
    "contradiction",
    [
        {"RANK": "8"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "3"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"GROUP_RANK": "-1"},
    ],
    ids=lambda row: "=".join(next(iter(row.items()))),
)
def test_a_contradiction_shows_the_variables(contradiction: dict[str, str]) -> None:
    environment = {**TORCHRUN, **contradiction}
    with pytest.raises(WorldError, match="contradict") as caught:
        RankInfo.from_environment(environment)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        assert f"{name}={environment[name]}" in str(caught.value)


def row(prefix: str) -> dict[str, str]:
    """Variables of worker 5 of 8, the second of four on the second node."""
    return variables(f"{prefix}RANK=5 {prefix}SIZE=8 {prefix}LOCAL_RANK=1 {prefix}LOCAL_SIZE=4")


OPEN_MPI = row("OMPI_COMM_WORLD_")
MPICH = variables("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
PALS = {**variables("PALS_RANKID=5 PALS_NODEID=1 PALS_LOCAL_RANKID=1"), **row("PMI_")}
HOROVOD = {**row("HOROVOD_"), "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"}
# As Slurm 22.05's srun -N2 -n8 sets them for its task 5.
SLURM = variables(
    "SLURM_JOB_ID=7 SLURM_JOB_NODELIST=hal[01-02] SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NPROCS=8 SLURM_NTASKS=8 "
    "SLURM_PROCID=5 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=hal[01-02] SLURM_STEP_NUM_NODES=2 "
    "SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_TASKS_PER_NODE=4(x2)"
)
FLUX = variables(
    "FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 FLUX_JOB_ID=ƒ2PqVbFs "
    "FLUX_URI=local:///run/flux/local PMI_RANK=5 PMI_SIZE=8 PMI_FD=13"
)
POD = variables("KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=5 WORLD_SIZE=8 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
LAUNCHERS = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "PALS": PALS, "Horovod": HOROVOD, "Slurm": SLURM, "Flux": FLUX}


@pytest.mark.parametrize(("launcher", "variables"), LAUNCHERS.items())
def test_workers_of_every_launcher_know_their_place(launcher: str, variables: dict[str, str]) -> None:
    assert RankInfo.from_environment(variables) == RankInfo(5, 8, 1, 4, 1, launcher)


@pytest.mark.parametrize(("launcher", "variables"), LAUNCHERS.items())
def test_what_is_wrong_with_a_launchers_variables_is_named(launcher: str, variables: dict[str, str]) -> None:
    rank = next(name for name in variables if name.endswith(("RANK", "RANKID", "PROCID")))
    with pytest.raises(WorldError, match=f"{launcher}'s variables contradict each other: {rank}=9"):
        RankInfo.from_environment({**variables, rank: "9"})
    with pytest.raises(WorldError, match=f"{launcher}'s variables must be integers: {rank}='x'"):
        RankInfo.from_environment({**variables, rank: "x"})
    size = next(name for name in variables if name.endswith(("SIZE", "NUM_TASKS")))
    with pytest.raises(WorldError, match=rf"{launcher}'s variables are incomplete: .*{rank}.* set, .*{size}.* not set"):
        RankInfo.from_environment({name: value for name, value in variables.items() if name != size})


def test_workers_of_horovodrun_have_their_number_from_it_alone() -> None:
    own = {**HOROVOD, "HOROVOD_CROSS_RANK": "0", "LOCKSTEP_NODE": "1", "RANK": "0", "WORLD_SIZE": "1"}
    more = {"TORCHELASTIC_RESTART_COUNT": "2", "LOCKSTEP_SNAPSHOTS": "/s", "LOCKSTEP_LOSS": "7 a worker was lost"}
    expected = RankInfo(5, 8, 1, 4, 1, "Horovod", 2, Path("/s"), "a worker was lost", 7.0)
    assert RankInfo.from_environment({**own, **more}) == expected
    assert RankInfo.from_environment({**own, **TORCHRUN}).launcher == "torchrun"  # that the worker has started


@pytest.mark.parametrize("mark", ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"])
def test_a_rank_alone_is_incomplete(mark: str) -> None:
    with pytest.raises(WorldError, match=f"incomplete: {mark} set"):
        RankInfo.from_environment({mark: "0"})


def test_a_pod_of_a_training_operator_is_a_node_with_one_worker() -> None:
    assert RankInfo.from_environment(POD) == RankInfo(5, 8, 0, 1, 5, "Kubeflow")
    with pytest.raises(WorldError, match="Kubeflow's variables contradict each other: RANK=8, WORLD_SIZE=8"):
        RankInfo.from_environment({**POD, "RANK": "8"})
    for name in ("KUBERNETES_SERVICE_HOST", "MASTER_ADDR"):
        with pytest.raises(WorldError, match="LOCAL_RANK"):
            RankInfo.from_environment({key: value for key, value in POD.items() if key != name})


def test_a_pod_that_is_meant_for_several_workers_is_not_one() -> None:
    for one in ("1", "auto", "gpu"):
        assert RankInfo.from_environment({**POD, "PET_NPROC_PER_NODE": one}).size == 8
    with pytest.raises(WorldError, match=r"PET_NPROC_PER_NODE=4: .* command: \[torchrun"):
        RankInfo.from_environment({**POD, "PET_NPROC_PER_NODE": "4"})


TRAIN_JOB = variables(
    "KUBERNETES_SERVICE_HOST=10.0.0.1 PET_NNODES=8 PET_NODE_RANK=5 PET_NPROC_PER_NODE=auto "
    "PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400"
)


def test_a_train_jobs_pods_are_not_jobs_of_their_own() -> None:
    assert RankInfo.from_environment(TRAIN_JOB) == RankInfo(5, 8, 0, 1, 5, "Kubeflow")
    with pytest.raises(WorldError, match=r"PET_NPROC_PER_NODE=4: .* command: \[torchrun"):
        RankInfo.from_environment({**TRAIN_JOB, "PET_NPROC_PER_NODE": "4"})
    with pytest.raises(WorldError, match="contradict each other: PET_NODE_RANK=8, PET_NNODES=8"):
        RankInfo.from_environment({**TRAIN_JOB, "PET_NODE_RANK": "8"})
    assert RankInfo.from_environment({**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}) == RankInfo()


@pytest.mark.parametrize(
    ("node", "local_rank", "rank", "local_size"), [(0, 3, 3, 4), (1, 0, 4, 4), (2, 2, 10, 3)], ids=["0", "1", "2"]
)
def test_uneven_slurm_nodes_count_their_own_tasks(node: int, local_rank: int, rank: int, local_size: int) -> None:
    said = f"SLURM_NODEID={node} SLURM_LOCALID={local_rank} SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=11"
    environment = {**SLURM, **variables(f"{said} SLURM_STEP_TASKS_PER_NODE=4(x2),3")}
    assert RankInfo.from_environment(environment) == RankInfo(rank, 11, local_rank, local_size, node, "Slurm")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,3"}, "contradict"),
        ({"SLURM_NODEID": "2"}, "contradict"),
        ({"SLURM_NODEID": "-1"}, "contradict"),
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "invalid Slurm variable SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_slurms_counts_must_fit(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(WorldError, match=words):
        RankInfo.from_environment({**SLURM, **wrong})


def test_flux_starts_equal_numbers_of_workers() -> None:
    assert RankInfo.from_environment({**FLUX, "FLUX_JOB_NNODES": "1"}).local_size == 8
    for nodes in ("3", "0"):
        with pytest.raises(WorldError, match=rf"8 workers on {nodes} nodes.*--tasks-per-node"):
            RankInfo.from_environment({**FLUX, "FLUX_JOB_NNODES": nodes})


def test_a_single_flux_task_may_start_workers_itself() -> None:
    alone = variables("FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1 FLUX_TASK_LOCAL_ID=0 PMI_RANK=0 PMI_SIZE=1")
    assert RankInfo.from_environment({**FLUX, **alone}) == RankInfo()


BATCH = variables(
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_JOB_ID=7 "
    "SLURM_JOB_NODELIST=hal[01-02] SLURM_TASKS_PER_NODE=4(x2)"
)
ONE_TASK = variables("SLURM_STEP_NODELIST=hal01 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1")


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(BATCH, id="a batch script"),
        pytest.param({**BATCH, **ONE_TASK, "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4"}, id="srun --pty bash"),
        pytest.param({**BATCH, **ONE_TASK, "SLURM_STEP_ID": "4294967290"}, id="salloc's shell on the node"),
        pytest.param({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, id="salloc's shell on the login host"),
    ],
)
def test_slurm_shell_is_not_a_worker(environment: dict[str, str]) -> None:
    assert RankInfo.from_environment(environment) == RankInfo()


@pytest.mark.parametrize(
    ("is_terminal", "task"),
    [
        (True, "1"),
        (True, "this process"),  # srun --pty python
        (False, "1"),  # a step that was started in such a shell
    ],
)
def test_a_terminals_shell_among_several_tasks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, task: str
) -> None:
    number = str(os.getpid()) if task == "this process" else task
    environment = {**SLURM, "SLURM_PTY_PORT": "4", "SLURM_TASK_PID": number}
    monkeypatch.setattr(os, "isatty", lambda descriptor: is_terminal)
    if is_terminal and task == "1":
        with pytest.raises(WorldError, match=r"one of 8 tasks .*srun --overlap"):
            RankInfo.from_environment(environment)
    else:
        assert RankInfo.from_environment(environment).size == 8


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        pytest.param({**SLURM, **TORCHRUN, "SLURM_PROCID": "1"}, "torchrun", id="torchrun in srun"),
        pytest.param({**POD, **TORCHRUN}, "torchrun", id="torchrun in a pod"),
        pytest.param({**TRAIN_JOB, **TORCHRUN}, "torchrun", id="torchrun in a TrainJob"),
        pytest.param({**OPEN_MPI, **TORCHRUN, "OMPI_COMM_WORLD_RANK": "0"}, "torchrun", id="torchrun in mpirun"),
        pytest.param({**SLURM, **OPEN_MPI, "SLURM_PROCID": "0"}, "Open MPI", id="Open MPI by srun"),
        # Hydra starts its proxies with srun, one a node.
        pytest.param({**SLURM, **MPICH, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "MPICH", id="MPICH by srun"),
        pytest.param({**SLURM, **BATCH, **MPICH}, "MPICH", id="MPICH in a batch script"),
        pytest.param({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "13"}, "Slurm", id="srun --mpi=pmi2"),
        pytest.param({**POD, **OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"}, "Open MPI", id="mpirun in a pod"),
        pytest.param({**SLURM, **HOROVOD}, "Horovod", id="horovodrun in srun"),
        pytest.param({**SLURM, **FLUX, "SLURM_PROCID": "0"}, "Flux", id="Flux by srun"),
        pytest.param({**FLUX, **MPICH, "FLUX_TASK_RANK": "0"}, "MPICH", id="MPICH in Flux"),
    ],
)
def test_the_innermost_launcher_wins(environment: dict[str, str], launcher: str) -> None:
    assert RankInfo.from_environment(environment) == RankInfo(5, 8, 1, 4, 1, launcher)


ALONE_IN_OPEN_MPI = dict(zip(OPEN_MPI, "0101", strict=True))


def test_disagreeing_variables_of_two_mpis_are_both_named() -> None:
    words = (
        r"Open MPI's variables set worker 0 of 1, but MPICH's set PMI_RANK=5, PMI_SIZE=8; unset .* "
        r"unset OMPI_COMM_WORLD_RANK .*, or unset PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS$"
    )
    with pytest.raises(WorldError, match=words):
        RankInfo.from_environment({**MPICH, **ALONE_IN_OPEN_MPI})


@pytest.fixture
def _no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.world.launcher_environment._warnings", set())


@pytest.mark.usefixtures("_no_warning_yet")
@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({**TORCHRUN, **ONE_WORKER, **OPEN_MPI}, ["torchrun", "OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8"]),
        ({**TORCHRUN, **ONE_WORKER, **SLURM}, ["torchrun", "SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8"]),
        ({**SLURM, **ALONE_IN_OPEN_MPI}, ["Open MPI", "SLURM_STEP_NUM_TASKS=8"]),
    ],
)
def test_worker_of_a_smaller_job_than_started_is_warned_once(
    environment: dict[str, str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [RankInfo.from_environment(environment).size for _ in range(2)] == [1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"lockstep: warning: .*'s variables make this worker rank 0 of 1, but ", line)
    assert all(name in line for name in names)


@pytest.mark.usefixtures("_no_warning_yet")
def test_pmix_rank_without_a_world_size_is_not_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorldError, match="PMIX_RANK=1 is set, but not the number of workers"):
        RankInfo.from_environment({"PMIX_RANK": "1"})
    assert RankInfo.from_environment({"PMIX_RANK": "0"}) == RankInfo()
    assert "PMIX_RANK=0 is set, but not the number of workers" in capsys.readouterr().err


def test_workers_of_mvapich2_are_not_jobs_of_their_own() -> None:
    variables = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}
    with pytest.raises(WorldError, match=r"MV2_COMM_WORLD_SIZE=2: .* would run alone; .*`lockstep run`"):
        RankInfo.from_environment(variables)
    assert RankInfo.from_environment({**variables, "MV2_COMM_WORLD_SIZE": "1"}) == RankInfo()
    assert RankInfo.from_environment({**variables, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    "environment", [*LAUNCHERS.values(), TORCHRUN, {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, {}]
)
def test_a_usual_start_warns_of_nothing(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    RankInfo.from_environment(environment)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("launcher", [SLURM, OPEN_MPI, MPICH], ids=["Slurm", "Open MPI", "MPICH"])
def test_a_rank_that_no_live_launcher_explains_is_named(launcher: dict[str, str]) -> None:
    with pytest.raises(WorldError, match=r"RANK=0 contradicts .* as 5 of 8 .*unset RANK$"):
        RankInfo.from_environment({**launcher, "RANK": "0"})
    with pytest.raises(WorldError, match=r"RANK=0, WORLD_SIZE=1 contradicts .*unset RANK WORLD_SIZE$"):
        RankInfo.from_environment({**launcher, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    copied = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}  # by a script, from the launcher's
    assert RankInfo.from_environment({**launcher, **copied}).launcher == RankInfo.from_environment(launcher).launcher
