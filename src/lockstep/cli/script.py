"""`lockstep script`: write a batch script for a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from lockstep.cli.parse import parse
from lockstep.errors import ConfigError
from lockstep.launch.plan.batch_job import BatchJob
from lockstep.launch.plan.batch_script import SUBMIT, System, render


@dataclass(frozen=True)
class ScriptCommand:
    """Write a batch script that starts the command after -- as a job of Slurm, PBS or LSF."""

    system: Annotated[Positional[System], arg(metavar="slurm|pbs|lsf")]
    """The batch system."""
    job: BatchJob = field(default_factory=BatchJob)
    output: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write to this new file instead of the terminal."""
    force: bool = False
    """Replace the file of --output."""


def main(words: Sequence[str]) -> int:
    flags, command = list(words), list[str]()
    if "--" in words:
        at = flags.index("--")
        flags, command = flags[:at], flags[at + 1 :]
    wanted = parse(ScriptCommand, "script", flags)
    text = render(wanted.system, wanted.job, command)
    if wanted.output is None:
        print(text, end="")
        return 0
    try:
        with wanted.output.open("w" if wanted.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--output {wanted.output} is there already; choose another, or add --force") from None
    except OSError as error:
        raise ConfigError(f"--output {wanted.output} cannot be written: {error.strerror}") from None
    print(f"submit it with: {SUBMIT[wanted.system].replace('FILE', str(wanted.output))}", file=sys.stderr)
    return 0
