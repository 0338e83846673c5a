"""The plan of a job: which command runs how often, with which variables. Pure data; nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# What scripts of Horovod's API may read, the same for every worker of a job on this machine.
HOROVOD_VARIABLES = {
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_GLOO_IFACE": LOOPBACK_INTERFACE,
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
}
PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
    *(f"HOROVOD_{part}{what}" for part in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
)


@dataclass(frozen=True)
class LocalPlan:
    """A job on this machine: `workers` processes of one command, with `environment` on top of the launcher's own."""

    workers: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]


def plan_local(workers: int, command: Sequence[str], cores: int, environment: Mapping[str, str]) -> LocalPlan:
    """Plan a job of `workers` processes on a machine with `cores` usable cores.

    Gloo and NCCL are held to the loopback interface, so that the job listens nowhere else; threads are shared out,
    because as many threads as cores in each worker would make them wait for each other.

    Raises:
        ConfigError: `workers` is not positive.
    """
    if workers < 1:
        raise ConfigError(f"-np is a number of workers, 1 or more, or auto; got {workers}")
    variables = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    variables |= HOROVOD_VARIABLES
    if "OMP_NUM_THREADS" in environment:
        threads, reason = environment["OMP_NUM_THREADS"], "from OMP_NUM_THREADS"
    else:
        threads, reason = str(max(1, cores // workers)), f"{cores} cores / {workers} workers"
        variables["OMP_NUM_THREADS"] = threads
    each = "1 thread" if threads == "1" else f"{threads} threads"
    notes = [f"{workers} workers on this machine, {each} each ({reason})"]
    if workers > cores:
        notes.append(f"warning: {workers} workers share {cores} cores and will slow each other down")
    return LocalPlan(workers, tuple(command), variables, tuple(notes))


def horovod_variables(worker: Mapping[str, str]) -> dict[str, str]:
    """Horovod's names for what torchrun's variables tell a worker.

    A cross rank is the number of a worker's node among the nodes that have a worker of its local rank; with as many
    workers on each node, as here, that is the node's number.
    """
    return {
        "HOROVOD_RANK": worker["RANK"],
        "HOROVOD_SIZE": worker["WORLD_SIZE"],
        "HOROVOD_LOCAL_RANK": worker["LOCAL_RANK"],
        "HOROVOD_LOCAL_SIZE": worker["LOCAL_WORLD_SIZE"],
        "HOROVOD_CROSS_RANK": worker["GROUP_RANK"],
        "HOROVOD_CROSS_SIZE": worker["GROUP_WORLD_SIZE"],
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": worker["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": worker["MASTER_PORT"],
    }


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's environment its workers get.

    Exported shell functions and OLDPWD are the launching shell's own affair; PLACE describes the launcher where it is
    itself a worker of another job. CUDA_VISIBLE_DEVICES, which Horovod drops because other hosts have other devices, is
    handed on: this host is the one for which the user has set it.
    """
    dropped = {"OLDPWD", "HOROVOD_ELASTIC", *PLACE}
    kept = (name for name in environment if not name.startswith("BASH_FUNC_") and name not in dropped)
    return {name: environment[name] for name in kept}
