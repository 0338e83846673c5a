"""`lockstep data verify`: find damaged images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.cli.data.processes_flag import Jobs, check_jobs, cores
from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import DataError
from lockstep.files.untrusted import printable_name


@dataclass(frozen=True)
class VerifyCommand:
    """Find damaged images: check a pack's checksums, or decode every image of a folder."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """Folder with train/ and val/ (or test/), or a pack."""
    jobs: Jobs = "auto"
    """Number of processes; auto: one per core."""

    def __post_init__(self) -> None:
        check_jobs(self.jobs)


def main(arguments: Sequence[str]) -> int:
    command = parse(VerifyCommand, "data verify", arguments)
    from lockstep.cli.data.progress import progress
    from lockstep.data.sources import verify

    plan = verify.plan(command.path)
    with progress("verifying", plan.samples, "images") as advance:
        bad = verify.run(plan, cores(command.jobs), advance)
    for line in bad:
        print(printable_name(line))
    if bad:
        raise DataError(f"{command.path}: {len(bad):,} damaged, listed above; copy or pack them again, or remove them")
    print(f"{command.path}: none of {plan.samples:,} images is damaged")
    return 0
