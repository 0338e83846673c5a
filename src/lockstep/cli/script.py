"""`lockstep script`: write a batch script for a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.launch.plan.batch_script import BatchJob, System, render
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.site_profiles import find_site


@dataclass(frozen=True)
class ScriptCommand:
    """Write a batch script that runs a command as a job of Slurm, PBS, LSF or Flux.

    Examples:
        lockstep script slurm --nodes 2 --gpus-per-node 4 -- python train.py > job.sh
    """

    system: Annotated[Positional[System], arg(metavar="slurm|pbs|lsf|flux")]
    """Batch system."""
    job: BatchJob = field(default_factory=BatchJob)
    site: Annotated[str | None, arg(metavar="NAME|FILE|none")] = None
    """Site profile. Default: the one that matches."""


def split_at_dashes(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the flags before the first "--" and the command after it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def main(arguments: Sequence[str]) -> int:
    flags, command = split_at_dashes(arguments)
    wanted = parse(ScriptCommand, "script", flags)
    site = find_site(wanted.site, os.environ, names_of_this_machine())
    text = render(wanted.system, wanted.job, command, site)
    print(text, end="")
    return 0
