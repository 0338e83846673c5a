"""`-j`: the number of processes of a command."""

from __future__ import annotations

from typing import Annotated, Literal

from lockstep.config.flags import arg
from lockstep.errors import require
from lockstep.world.world import usable_cores

Jobs = Annotated[int | Literal["auto"], arg(aliases=["-j"], metavar="N|auto")]


def check_jobs(jobs: int | Literal["auto"]) -> None:
    """Raise ConfigError for a number of processes below 1."""
    require(jobs == "auto" or jobs >= 1, "--jobs", jobs, "at least 1, or auto")


def cores(jobs: int | Literal["auto"]) -> int:
    """Return the number of processes; auto: one per core that this process may use."""
    return usable_cores() if jobs == "auto" else jobs
