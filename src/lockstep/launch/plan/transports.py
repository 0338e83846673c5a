"""How Lockstep's node process is started on a host: directly, or by the words of ssh, srun, blaunch or mpirun.

Each of them connects the node process's standard streams with the launcher's, which is all that is asked of it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["local", "ssh", "slurm", "pbs", "lsf", "mpi"]
NODE_MODULE = "lockstep.launch.node"
NODE_WORDS = ("-P", "-m", NODE_MODULE)  # -P: modules in the job's folder are the workers' alone


@dataclass(frozen=True)
class Transport:
    """A way to other hosts.

    Args:
        python: The Python there; empty: the path of this one.
        options: More words for the program that leads there, such as ssh's -p or -i.
        program: Which mpirun; for `mpi` alone.
    """

    kind: Kind
    python: str = ""
    options: tuple[str, ...] = ()
    program: str = "mpirun"


def start_words(transport: Transport, host: str, is_here: bool) -> tuple[str, ...]:
    """The words that start the node process on a host."""
    if transport.kind == "local" or (is_here and transport.kind in DIRECT_HERE):
        return (sys.executable, *NODE_WORDS)
    return WAYS[transport.kind](transport, host, (transport.python or sys.executable, *NODE_WORDS))


def _ssh(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    return (*ssh_words(transport.options), host, f"exec {shlex.join(node)}")


def _srun(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    step = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--mem=0")
    streams = ("--unbuffered", "--quiet", "--input=0", "--kill-on-bad-exit=0")
    return ("srun", *step, *streams, *transport.options, *node)


def _blaunch(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    return ("blaunch", *transport.options, "-z", host, *node)


def _mpirun(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    # Open MPI would bind the node process, and so all its workers, to one core; Hydra knows the same words.
    return (transport.program, "-np", "1", "-host", host, "-bind-to", "none", *transport.options, *node)


WAYS: dict[Kind, Callable[[Transport, str, tuple[str, ...]], tuple[str, ...]]] = {
    "ssh": _ssh,
    "pbs": _ssh,  # a PBS job's hosts let its owner in by SSH; pbsdsh hands on no input
    "slurm": _srun,
    "lsf": _blaunch,
    "mpi": _mpirun,
}
DIRECT_HERE = ("ssh", "pbs", "lsf")  # that need no way to the host on which the launcher runs


def ssh_words(options: tuple[str, ...]) -> tuple[str, ...]:
    """ssh that asks nothing, notices a dead connection, and shares none with others."""
    settings = ("BatchMode=yes", "ServerAliveInterval=3", "ServerAliveCountMax=3", "ControlPath=none")
    return ("ssh", "-T", *options, *(word for setting in settings for word in ("-o", setting)))
