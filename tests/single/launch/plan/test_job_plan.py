"""The plan of a job: who runs what, with which variables."""

from __future__ import annotations

import socket
import sys

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.job_plan import (
    HOROVOD_VARIABLES,
    LOOPBACK_INTERFACE,
    NODE_MODULE,
    Kind,
    NodePlan,
    Transport,
    handed_on,
    horovod_variables,
    plan_job,
    plan_local,
    start_command,
)
from lockstep.world.accelerator import VISIBLE

COMMAND = ("python", "-m", "lockstep", "train", "digits")
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_GLOO_IFACE": LOOPBACK_INTERFACE,
    **HOROVOD_VARIABLES,
}


@pytest.mark.parametrize(
    ("workers", "cores", "environment", "variables", "notes"),
    [
        (1, 2, {}, {"OMP_NUM_THREADS": "2"}, ["1 worker on this machine, 2 threads each (2 cores / 1 worker)"]),
        (2, 8, {}, {"OMP_NUM_THREADS": "4"}, ["2 workers on this machine, 4 threads each (8 cores / 2 workers)"]),
        (2, 2, {}, {"OMP_NUM_THREADS": "1"}, ["2 workers on this machine, 1 thread each (2 cores / 2 workers)"]),
        (
            3,
            8,
            {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth0"},
            {},
            ["3 workers on this machine, 5 threads each (from OMP_NUM_THREADS)"],
        ),
        (
            5,
            2,
            {},
            {"OMP_NUM_THREADS": "1"},
            [
                "5 workers on this machine, 1 thread each (2 cores / 5 workers)",
                "warning: 5 workers share 2 cores and will slow each other down",
            ],
        ),
    ],
    ids=[
        "one worker has all cores",
        "threads are shared out",
        "a core for each",
        "the user's threads are kept",
        "more workers than cores",
    ],
)
def test_a_local_job(
    workers: int, cores: int, environment: dict[str, str], variables: dict[str, str], notes: list[str]
) -> None:
    plan = plan_local(workers, list(COMMAND), cores, environment)
    assert plan.command == COMMAND
    assert plan.nodes == (NodePlan("localhost", workers, (sys.executable, "-P", "-m", NODE_MODULE)),)
    assert plan.is_local
    assert plan.environment == {**LOOPBACK, **variables}
    assert list(plan.notes) == notes


def test_a_job_on_several_hosts_keeps_their_order_and_slots() -> None:
    hosts = [Host("b", 1), Host("a", 4), Host("here", 2)]
    plan = plan_job(COMMAND, hosts, Transport("ssh", "/opt/python", ("-p2222",)), 8, {}, frozenset({"here"}))
    assert [(node.host, node.workers, node.is_here) for node in plan.nodes] == [
        ("b", 1, False),
        ("a", 4, False),
        ("here", 2, True),
    ]
    assert [plan.first_rank(index) for index in range(3)] == [0, 1, 5]
    assert plan.workers == 7
    assert not plan.is_local
    assert plan.notes == ("7 workers: 1 on b, 4 on a, 2 on here",)
    assert plan.nodes[0].start[0] == "ssh"
    assert "-p2222" in plan.nodes[0].start
    assert plan.nodes[0].start[-2:] == ("b", f"exec /opt/python -P -m {NODE_MODULE}")
    assert plan.nodes[2].start == (sys.executable, "-P", "-m", NODE_MODULE)
    assert "GLOO_SOCKET_IFNAME" not in plan.environment


def test_ssh_checks_host_keys_as_it_is_configured() -> None:
    plan = plan_job(COMMAND, [Host("a", 1), Host("b", 1)], Transport("ssh"), 8, {})
    words = " ".join(plan.nodes[0].start).lower()
    assert not [option for option in ("hostkeychecking", "knownhosts", "hostkeyalias") if option in words]


def test_several_names_of_this_machine_are_one_node() -> None:
    names = frozenset({"localhost", "here"})
    plan = plan_job(COMMAND, [Host("localhost", 1), Host("here", 2)], Transport("ssh"), 8, {}, names)
    assert [node.workers for node in plan.nodes] == [3]
    for twice, message in (
        ("a,b,A", "A is listed twice"),
        ("a,b,a", "a is listed twice"),
        ("here,b,localhost", "are this machine"),
    ):
        hosts = [Host(name, 1) for name in twice.split(",")]
        with pytest.raises(ConfigError, match=message):
            plan_job(COMMAND, hosts, Transport("ssh"), 8, {}, names)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [("slurm", "srun", "--nodelist=n1"), ("lsf", "blaunch", "n1"), ("mpi", "mpiexec", "n1"), ("pbs", "ssh", "n1")],
)
def test_batch_systems_have_ways_of_their_own(kind: Kind, first: str, last: str) -> None:
    words = start_command(Transport(kind, program="mpiexec"), "n1", is_here=False)
    assert words[0] == first
    assert last in words
    assert words[-1].endswith(NODE_MODULE)


def test_interface_of_a_local_job_is_this_machines_loopback() -> None:
    assert LOOPBACK_INTERFACE in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("cores", [1, 2, 7, 64])
@pytest.mark.parametrize("workers", [1, 2, 7, 64])
def test_threads_never_exceed_the_cores_nor_vanish(workers: int, cores: int) -> None:
    threads = int(plan_local(workers, COMMAND, cores, {}).environment["OMP_NUM_THREADS"])
    assert threads >= 1
    assert threads * workers <= max(cores, workers)
    assert (threads + 1) * workers > cores


@pytest.mark.parametrize("workers", [0, -2])
def test_a_job_needs_a_worker(workers: int) -> None:
    with pytest.raises(ConfigError, match=f"-np .*{workers}"):
        plan_local(workers, COMMAND, 4, {})


def test_torchruns_variables_have_horovods_names_too() -> None:
    numbers = {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1}
    worker = {name: str(value) for name, value in numbers.items()}
    worker |= {"GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert horovod_variables(worker, slots=[2, 2, 2, 2]) == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "4",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29500",
    }


def test_cross_ranks_count_the_nodes_that_have_such_a_worker() -> None:
    worker = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}
    worker |= {"GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    variables = horovod_variables(worker, slots=[3, 1, 2])
    assert (variables["HOROVOD_CROSS_RANK"], variables["HOROVOD_CROSS_SIZE"]) == ("1", "2")


def test_what_is_a_hosts_own_is_not_handed_on_to_another() -> None:
    own = {"HOME": "/root", "TMPDIR": "/tmp", "SSH_CONNECTION": "x", "CUDA_VISIBLE_DEVICES": "1", "SLURM_PROCID": "0"}
    own |= {"BASH_FUNC_module%%": "() {}", "OLDPWD": "/", **dict.fromkeys(VISIBLE, "1")}
    kept = {"PATH": "/bin", "PYTHONPATH": "/x", "SLURM_JOB_ID": "7", "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}
    assert handed_on({**own, **kept}, elsewhere=True) == kept


def test_all_but_the_launchers_own_rank_info_is_handed_on() -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "BASH_FUNC_module%%": "() {}", "OLDPWD": "/"}
    kept |= {"HOROVOD_FUSION_THRESHOLD": "0"}
    dropped = {"RANK": "1", "HOROVOD_RANK": "1", "HOROVOD_ELASTIC": "1"}
    assert handed_on({**kept, **dropped}) == kept
