"""A job's request to a batch system: nodes, workers, GPUs, CPUs and time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import Annotated

from lockstep.config.flags import arg
from lockstep.errors import ConfigError, plural, require

WARNING_SECONDS = 120  # from the signal to the time limit; less in a job of less than 8 minutes
TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
WORD = re.compile(r"[A-Za-z0-9][\w.+:@/,-]*", re.ASCII)


@dataclass(frozen=True)
class BatchJob:
    """A job's request to a batch system.

    Raises:
        ConfigError: A flag is invalid or contradicts another.
    """

    nodes: int = 1
    """Number of nodes."""
    workers_per_node: int | None = None
    """Workers per node. Default: one per GPU, or 1."""
    workers: Annotated[int | None, arg(name="np", aliases=["-np"], metavar="N")] = None
    """Total number of workers, instead of --workers-per-node."""
    gpus_per_node: Annotated[int, arg(metavar="G")] = 0
    """GPUs per node, one per worker."""
    cpus_per_worker: Annotated[int | None, arg(metavar="C")] = None
    """CPUs per worker. Default: 4, or those of a slot in LSF."""
    time: Annotated[str, arg(metavar="[D-]HH:MM:SS")] = "01:00:00"
    """Time limit."""
    name: str = "lockstep"
    """Name of the job and its output file."""
    account: str | None = None
    """Account, or project in LSF."""
    queue: Annotated[str | None, arg(aliases=["--partition"])] = None
    """Queue or partition."""
    setup: str = ""
    """Shell commands to run first, such as 'module load cuda'."""

    def __post_init__(self) -> None:
        for flag, number, least in (
            ("--nodes", self.nodes, 1),
            ("--workers-per-node", self.workers_per_node, 1),
            ("-np", self.workers, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--cpus-per-worker", self.cpus_per_worker, 1),
        ):
            require(number is None or number >= least, flag, number, f"at least {least}")
        for flag, word in (("--name", self.name), ("--account", self.account), ("--queue", self.queue)):
            is_valid = word is None or WORD.fullmatch(word) is not None
            require(is_valid, flag, repr(word), "one word of letters, digits and _.+:@/,-")
        require("/" not in self.name, "--name", self.name, "without /, as it also names the output file")
        match = TIME.fullmatch(self.time)
        is_valid = match is not None and self.seconds > 0
        require(is_valid, "--time", repr(self.time), "[D-]HH:MM:SS, such as 12:00:00 or 2-00:00:00")
        if self.workers is not None:
            if self.workers_per_node not in (None, self.workers / self.nodes):
                raise ConfigError(
                    f"-np {self.workers} on {self.nodes} nodes contradicts --workers-per-node {self.workers_per_node}"
                )
            if self.workers % self.nodes:
                raise ConfigError(f"-np {self.workers} cannot be divided equally among {self.nodes} nodes")
        if self.gpus_per_node and self.per_node != self.gpus_per_node:
            here = f"{plural(self.per_node, 'worker')} and {plural(self.gpus_per_node, 'GPU')} per node"
            raise ConfigError(f"{here}, but a worker has one GPU; remove --workers-per-node and -np")

    @property
    def per_node(self) -> int:
        """Workers on each node."""
        if self.workers is not None:
            return self.workers // self.nodes
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def seconds(self) -> int:
        """The time limit in seconds."""
        match = TIME.fullmatch(self.time)
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0, 0, 0, 0)
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def warning_seconds(self) -> int:
        """How long before the time limit the job receives its signal to stop, in seconds."""
        return min(WARNING_SECONDS, ceil(self.seconds / 4))
