"""`lockstep explain`: what bounds the steps of runs and scaling studies, and what would shorten them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError
from lockstep.files.output import say
from lockstep.files.untrusted import printable


@dataclass(frozen=True)
class ExplainCommand:
    """Say what bounds a job's steps, and which changes would shorten them by how much.

    Examples:
        lockstep explain steps
        lockstep explain study/scaling.jsonl
    """

    sources: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN|STUDY")]
    """Folders of runs or of `--observe-dir`, records of scaling studies, or folders of these."""
    json: bool = False
    """Print one JSON object per run or study."""


def main(arguments: Sequence[str]) -> int:
    command = parse(ExplainCommand, "explain", arguments)
    if not command.sources:
        raise ConfigError("missing the records to explain; for example: lockstep explain steps study/scaling.jsonl")
    from lockstep.report.read_steps import explain_all
    from lockstep.report.sources import gather

    material = gather(command.sources, "explain")
    for warning in material.warnings:
        say(printable(f"lockstep explain: warning: {warning}"))
    verdicts = explain_all(material.runs, material.studies)
    if not verdicts:
        raise ConfigError(
            "no times of steps in these records; needed: some seconds with --observe-dir, an epoch of `lockstep train` "
            "with several workers, or a scaling study"
        )
    for name, verdict in verdicts:
        if command.json:
            print(json.dumps({"name": name, **verdict.to_mapping()}))
        else:
            print(printable(f"{name}:"), *map(printable, verdict.lines), sep="\n")
    return 0
