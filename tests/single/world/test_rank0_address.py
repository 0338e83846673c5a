"""Where rank 0 is, from the variables of launchers and batch systems."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import flux
import pytest

from lockstep.errors import WorldError
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rank0_address import PORTS, derived_port, find_address, is_here, launch_name


def _place(launcher: str) -> RankInfo:
    return RankInfo(5, 8, 1, 4, 1, launcher)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "hal[02-03]",
    "SLURM_JOB_NODELIST": "hal[01-03]",
}
HNP = "2231042048.0;tcp://10.200.0.2,127.0.0.9:45807"


@pytest.mark.parametrize(
    ("launcher", "environment", "host"),
    [
        pytest.param("Slurm", SLURM, "hal02", id="the step's first node"),
        pytest.param("MPICH", SLURM, "hal01", id="the job's first node"),
        pytest.param("Open MPI", {**SLURM, "OMPI_MCA_orte_hnp_uri": HNP}, "hal01", id="Open MPI in Slurm"),
        pytest.param("Open MPI", {"OMPI_MCA_orte_hnp_uri": HNP}, "127.0.0.9", id="mpirun's nearest address"),
        pytest.param("Open MPI", {"PMIX_NAMESPACE": "prterun-hal-7-18361@1"}, "hal-7", id="Open MPI 5"),
        pytest.param("Slurm", {**SLURM, "MASTER_ADDR": "hal09"}, "hal09", id="MASTER_ADDR"),
        pytest.param("PALS", {"PBS_NODEFILE": "a\nb\n"}, "a", id="PBS"),
        pytest.param("Kubeflow", {"MASTER_ADDR": "job-master-0"}, "job-master-0", id="PyTorchJob"),
        pytest.param("Kubeflow", {"PET_MASTER_ADDR": "job-node-0-0.job"}, "job-node-0-0.job", id="TrainJob"),
        pytest.param("MPICH", {"LSB_DJOB_HOSTFILE": "a\na\nb\n"}, "a", id="LSF"),
    ],
)
def test_rank_0_is_where_the_variables_say(
    launcher: str, environment: dict[str, str], host: str, tmp_path: Path
) -> None:
    for name in environment.keys() & {"PBS_NODEFILE", "LSB_DJOB_HOSTFILE"}:
        (tmp_path / name).write_text(environment[name])
        environment = {**environment, name: str(tmp_path / name)}
    found, port = find_address(_place(launcher), environment)
    assert found == host
    assert port in PORTS
    assert find_address(_place(launcher), {**environment, "MASTER_PORT": "1234"}) == (host, 1234)


def test_rank_0_is_on_the_first_host_of_a_flux_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux.use(tmp_path / "bin", "tuolumne[1003,1001]", monkeypatch)
    host, port = find_address(_place("Flux"), {"FLUX_JOB_ID": flux.JOB})
    assert (host, port in PORTS) == ("tuolumne1003", True)
    assert find_address(_place("Flux"), {"FLUX_JOB_ID": flux.JOB, "MASTER_ADDR": "a"}) == ("a", port)
    with pytest.raises(WorldError, match=r"flux job info x R.*set MASTER_ADDR"):
        find_address(_place("Flux"), {"FLUX_JOB_ID": "x"})
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(WorldError, match=r"`flux job info .*`: No such file.*; set MASTER_ADDR"):
        find_address(_place("Flux"), {"FLUX_JOB_ID": flux.JOB})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, r"set MASTER_ADDR .* and MASTER_PORT"),
        ({"PBS_NODEFILE": "/nowhere"}, r"PBS_NODEFILE=/nowhere cannot be read.*set MASTER_ADDR"),
        ({"PBS_NODEFILE": "/dev/tty"}, r"PBS_NODEFILE=/dev/\w+ cannot be read.*set MASTER_ADDR"),
        ({"PBS_NODEFILE": "/dev/zero"}, r"PBS_NODEFILE=/dev/zero cannot be read .* \(it is not a regular file\)"),
        ({"SLURM_JOB_NODELIST": "hal["}, r"invalid SLURM_JOB_NODELIST"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, r"MASTER_PORT='x' is not a port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, r"MASTER_PORT='65536' is not a port"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "9" * 5000}, r"MASTER_PORT='9{40}' is not a port"),
    ],
)
def test_missing_address_names_the_fix(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    with pytest.raises(WorldError, match=words):
        find_address(_place("MPICH"), environment)


def test_a_job_on_one_host_stays_on_loopback() -> None:
    environment = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"}
    assert find_address(RankInfo(0, 2, 0, 2, 0, "MPICH"), environment) == ("127.0.0.1", 1234)


def test_ports_follow_from_the_launch() -> None:
    steps = [launch_name(_place("Slurm"), {**SLURM, "SLURM_STEP_ID": step}) for step in "01"]
    jobs = [launch_name(_place("MPICH"), {"PBS_JOBID": job}) for job in ("12.pbs", "13.pbs")]
    assert len({derived_port(launch) for launch in (*steps, *jobs)}) == 4
    assert derived_port("123456789") == 20_000 + 0xCBF43926 % 10_000  # CRC-32's published check value


def test_a_host_is_here_or_not() -> None:
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert not is_here("192.0.2.1")  # RFC 5737: an address that nobody has
