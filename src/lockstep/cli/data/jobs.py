"""`-j`: how many processes a command uses."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.errors import ConfigError

Jobs = Annotated[int | Literal["auto"], arg(aliases=["-j"], metavar="N|auto")]


def check_jobs(jobs: int | Literal["auto"]) -> None:
    """Refuse a number of processes that cannot be."""
    if jobs != "auto" and jobs < 1:
        raise ConfigError(f"-j is a number of processes, 1 or more, or auto; got {jobs}")


def cores(jobs: int | Literal["auto"]) -> int:
    """The number of processes; auto: one for each core that this process may use."""
    if jobs != "auto":
        return jobs
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
