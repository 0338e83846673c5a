"""The plan of a job: who runs what, with which variables."""

from __future__ import annotations

import socket

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.plan import (
    HOROVOD_VARIABLES,
    LOOPBACK_INTERFACE,
    LocalPlan,
    handed_on,
    horovod_variables,
    plan_local,
)

COMMAND = ("python", "-m", "lockstep", "train", "digits")
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    **HOROVOD_VARIABLES,
}


@pytest.mark.parametrize(
    ("workers", "cores", "environment", "plan"),
    [
        (
            2,
            8,
            {},
            LocalPlan(
                2,
                COMMAND,
                {**LOOPBACK, "OMP_NUM_THREADS": "4"},
                ("2 workers on this machine, 4 threads each (8 cores / 2 workers)",),
            ),
        ),
        (
            2,
            2,
            {},
            LocalPlan(
                2,
                COMMAND,
                {**LOOPBACK, "OMP_NUM_THREADS": "1"},
                ("2 workers on this machine, 1 thread each (2 cores / 2 workers)",),
            ),
        ),
        (
            3,
            8,
            {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth0"},
            LocalPlan(3, COMMAND, LOOPBACK, ("3 workers on this machine, 5 threads each (from OMP_NUM_THREADS)",)),
        ),
        (
            5,
            2,
            {},
            LocalPlan(
                5,
                COMMAND,
                {**LOOPBACK, "OMP_NUM_THREADS": "1"},
                (
                    "5 workers on this machine, 1 thread each (2 cores / 5 workers)",
                    "warning: 5 workers share 2 cores and will slow each other down",
                ),
            ),
        ),
    ],
    ids=["threads are shared out", "a core for each", "the user's threads are kept", "more workers than cores"],
)
def test_a_local_job(workers: int, cores: int, environment: dict[str, str], plan: LocalPlan) -> None:
    assert plan_local(workers, list(COMMAND), cores, environment) == plan


def test_the_interface_that_a_job_is_held_to_is_this_machines_loopback() -> None:
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
    assert horovod_variables(worker) == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "4",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29500",
    }


def test_the_shells_own_affairs_and_the_launchers_own_place_are_not_handed_on() -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "HOROVOD_FUSION_THRESHOLD": "0"}
    dropped = {"BASH_FUNC_module%%": "() {}", "OLDPWD": "/", "RANK": "1", "HOROVOD_RANK": "1", "HOROVOD_ELASTIC": "1"}
    assert handed_on({**kept, **dropped}) == kept
