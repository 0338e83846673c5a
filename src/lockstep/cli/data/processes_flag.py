"""`-j`: how many processes a command uses."""

from __future__ import annotations

from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.errors import ConfigError
from lockstep.world.world import usable_cores

Jobs = Annotated[int | Literal["auto"], arg(aliases=["-j"], metavar="N|auto")]


def check_jobs(jobs: int | Literal["auto"]) -> None:
    """Refuse a number of processes that cannot be."""
    if jobs != "auto" and jobs < 1:
        raise ConfigError(f"-j is a number of processes, 1 or more, or auto; got {jobs}")


def cores(jobs: int | Literal["auto"]) -> int:
    """The number of processes; auto: one for each core that this process may use."""
    return usable_cores() if jobs == "auto" else jobs
