"""The plan of a job: which command runs how often, with which variables. Pure data; nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


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
