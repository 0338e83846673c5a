"""`lockstep report`: write figures, tables and a page on runs and studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError, printable, require
from lockstep.report.scaling_series import THRESHOLD, check_threshold


@dataclass(frozen=True)
class ReportCommand:
    """Write a report on runs and studies: RESULTS.md, index.html, figures, and tables as CSV and LaTeX.

    Missing or damaged records are reported as warnings.
    """

    sources: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN|STUDY")]
    """Run folders, study files, or folders of these."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="DIR")] = Path("report")
    """Output folder."""
    title: str = ""
    """Title of the report (default: names the program of a scaling study)."""
    threshold: float = THRESHOLD
    """Efficiency below which scaling is insufficient."""
    samples: Annotated[int, arg(metavar="N")] = 1_000_000
    """Samples in the tables of costs, such as those of an epoch."""
    carbon: Annotated[float | None, arg(metavar="G_PER_KWH")] = None
    """Grams of CO2 equivalents per kWh of the center's electricity."""
    verbose: Annotated[bool, arg(aliases=["-v"])] = False
    """Print the name of each file."""

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        require(self.samples >= 1, "--samples", self.samples, "at least 1")
        require(self.carbon is None or 0 <= self.carbon < 1e5, "--carbon", self.carbon, "0 or more grams per kWh")


def main(arguments: Sequence[str]) -> int:
    command = parse(ReportCommand, "report", arguments)
    if not command.sources:
        raise ConfigError("missing the folders to report on; for example: lockstep report runs study -o report")
    from lockstep.report.draw import PAGE, write
    from lockstep.report.sections import build
    from lockstep.report.sections.scaling import Costs
    from lockstep.report.sources import gather

    document = build(gather(command.sources), command.title, command.threshold, Costs(command.samples, command.carbon))
    for warning in document.warnings:
        print(printable(f"lockstep report: warning: {warning}"), file=sys.stderr)
    try:
        written = write(document, command.out)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"-o {command.out} cannot be written: {reason}; choose another folder with -o") from None
    for path in written if command.verbose else ():
        print(path)
    print(f"open {command.out / PAGE}")
    return 0
