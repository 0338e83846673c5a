"""Commands that start Lockstep's node process on a host: directly, or through ssh, srun, blaunch or mpirun.

Each of these programs only has to connect the node process's standard streams to the launcher's.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["local", "ssh", "slurm", "pbs", "lsf", "mpi"]
NODE_MODULE = "lockstep.launch.node"
NODE_ARGUMENTS = ("-P", "-m", NODE_MODULE)  # -P: modules in the job's folder are only for the workers


@dataclass(frozen=True)
class Transport:
    """A way to start processes on other hosts.

    Args:
        python: The Python there; empty: the same path as here.
        options: More arguments for the program, such as ssh's -p or -i.
        program: The name of mpirun; only for `mpi`.
    """

    kind: Kind
    python: str = ""
    options: tuple[str, ...] = ()
    program: str = "mpirun"


def start_command(transport: Transport, host: str, is_here: bool) -> tuple[str, ...]:
    """Return the command that starts the node process on a host."""
    if transport.kind == "local" or (is_here and transport.kind in DIRECT_HERE):
        return (sys.executable, *NODE_ARGUMENTS)
    return COMMANDS[transport.kind](transport, host, (transport.python or sys.executable, *NODE_ARGUMENTS))


def _ssh(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    return (*ssh_command(transport.options), host, f"exec {shlex.join(node)}")


def _srun(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    step = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--mem=0")
    streams = ("--unbuffered", "--quiet", "--input=0", "--kill-on-bad-exit=0")
    return ("srun", *step, *streams, *transport.options, *node)


def _blaunch(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    return ("blaunch", *transport.options, "-z", host, *node)


def _mpirun(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    # Open MPI would bind the node process, and thus all its workers, to one core; Hydra has the same flags.
    return (transport.program, "-np", "1", "-host", host, "-bind-to", "none", *transport.options, *node)


COMMANDS: dict[Kind, Callable[[Transport, str, tuple[str, ...]], tuple[str, ...]]] = {
    "ssh": _ssh,
    "pbs": _ssh,  # PBS allows the job's owner to log in by SSH; pbsdsh does not forward stdin
    "slurm": _srun,
    "lsf": _blaunch,
    "mpi": _mpirun,
}
DIRECT_HERE = ("ssh", "pbs", "lsf")  # not used for the launcher's own host


def ssh_command(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return an ssh command that never prompts, detects dead connections, and uses its own connection."""
    settings = ("BatchMode=yes", "ServerAliveInterval=3", "ServerAliveCountMax=3", "ControlPath=none")
    return ("ssh", "-T", *options, *(argument for setting in settings for argument in ("-o", setting)))
