"""`lockstep submit`: write a batch script, submit it, and show its output."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli.parse import parse
from lockstep.cli.script import split_at_dashes
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError
from lockstep.launch.plan.batch_script import BatchJob, render
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.site_profiles import find_site
from lockstep.launch.submission import submit

SCRIPTS = Path("lockstep-jobs")
# Variables that sbatch prefers to the script's lines, by the typed flag. Under "", lines that each job needs.
PREFERRED = {
    "": "ARRAY_INX ERROR JOB_NAME NO_REQUEUE OPEN_MODE OUTPUT SIGNAL WAIT",
    "--time": "TIMELIMIT",
    "--queue": "PARTITION",
    "--partition": "PARTITION",
    "--account": "ACCOUNT",
    "--gpus-per-node": "GPUS_PER_NODE GPUS",
}


@dataclass(frozen=True)
class SubmitCommand:
    """Write a batch script as `lockstep script` does, and submit it to Slurm, PBS or Flux.

    Examples:
        lockstep submit slurm --nodes 2 --gpus-per-node 4 -- python train.py
        lockstep submit pbs --follow -- lockstep train cifar10
    """

    system: Annotated[Positional[Literal["slurm", "pbs", "flux"]], arg(metavar="slurm|pbs|flux")]
    """Batch system."""
    job: BatchJob = field(default_factory=BatchJob)
    dependency: Annotated[str | None, arg(metavar="TYPE:ID")] = None
    """Start after another job, such as afterok:17."""
    site: Annotated[str | None, arg(metavar="NAME|FILE|none")] = None
    """Site profile. Default: the one that matches."""
    follow: bool = False
    """Show the job's output with tail -F until Ctrl-C; the job continues."""


def main(arguments: Sequence[str]) -> int:
    flags, command = split_at_dashes(arguments)
    wanted = parse(SubmitCommand, "submit", flags)
    site = find_site(wanted.site, os.environ, names_of_this_machine())
    text = render(wanted.system, wanted.job, command, site)
    for flag in ("", *flags):
        for name in PREFERRED.get(flag.partition("=")[0].replace("_", "-"), "").split():
            os.environ.pop(f"SBATCH_{name}", None)
    script = _write(wanted.job.name, text)
    job = submit(wanted.system, wanted.job.name, script, wanted.dependency)
    print(f"submitted job {job.id} ({wanted.job.name}): {script}")
    print(f"state: {job.show}; output: tail -F {shlex.quote(str(job.log))}; to cancel it: {job.cancel}", flush=True)
    if wanted.follow:
        with suppress(KeyboardInterrupt):
            subprocess.run(["tail", "-n", "+1", "-F", job.log], check=False)
    return 0


def _write(name: str, text: str) -> Path:
    """Write the script into a new file of the folder of scripts."""
    try:
        SCRIPTS.mkdir(exist_ok=True)
        number = 1
        while True:
            try:
                with (SCRIPTS / f"{name}-{number}.sh").open("x", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
                return SCRIPTS / f"{name}-{number}.sh"
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ConfigError(f"{SCRIPTS}/ cannot be written: {error.strerror}; change to another folder") from None
