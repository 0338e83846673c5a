"""`lockstep report`: figures, tables and a page of runs and studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from lockstep.cli.parse import parse
from lockstep.errors import ConfigError
from lockstep.files.untrusted import printable


@dataclass(frozen=True)
class ReportCommand:
    """Draw what runs and studies recorded: RESULTS.md, index.html, and each chart as PNG and SVG.

    Needs no torch. What is missing or damaged is said, and the rest is reported.
    """

    sources: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN|STUDY [...]", help_behavior_hint="")]
    """Run folders, TensorBoard folders, a study's .jsonl files, or folders of such as runs/ and study/."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="DIR")] = Path("report")
    """Folder that the report is written to."""
    title: str = "Training results"
    """Heading of the report."""
    verbose: Annotated[bool, arg(aliases=["-v"])] = False
    """List every file that was written."""


def main(words: Sequence[str]) -> int:
    command = parse(ReportCommand, "report", words)
    if not command.sources:
        raise ConfigError("name what to report, such as `lockstep report runs study -o report`")
    from lockstep.report.build import build
    from lockstep.report.draw.files import PAGE, write
    from lockstep.report.read.sources import gather

    document = build(gather(command.sources), command.title)
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
