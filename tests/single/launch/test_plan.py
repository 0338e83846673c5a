"""The plan of a job: who runs what, with which variables."""

from __future__ import annotations

import socket

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.plan import LOOPBACK_INTERFACE, LocalPlan, plan_local

COMMAND = ("python", "-m", "lockstep", "train", "digits")
LOOPBACK = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}


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
