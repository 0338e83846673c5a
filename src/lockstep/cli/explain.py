"""`lockstep explain`: what bounds the steps of runs and scaling studies, and what would shorten them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.cli.parse import parse
from lockstep.cli.script import split_at_dashes
from lockstep.config.flags import Positional, arg
from lockstep.errors import ConfigError, printable
from lockstep.files.output import say

if TYPE_CHECKING:
    from lockstep.report.run import Run


@dataclass(frozen=True)
class ExplainCommand:
    """Say what bounds a job's steps, and which changes would shorten them by how much.

    With --try, a command after `--` replaces the recorded one; {batch} in it is the samples of a worker's step.

    Examples:
        lockstep explain steps
        lockstep explain study/scaling.jsonl
        lockstep explain --try steps
    """

    sources: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN|STUDY")]
    """Folders of runs or of `--observe-dir`, records of scaling studies, or folders of these."""
    tries: Annotated[bool, arg(name="try")] = False
    """Run the program of one run again with the first two changes, and measure what each saves."""
    json: bool = False
    """Print one JSON object per run or study."""


def main(arguments: Sequence[str]) -> int:
    own, program = split_at_dashes(arguments)
    command = parse(ExplainCommand, "explain", own)
    if not command.sources:
        raise ConfigError("missing the records to explain; for example: lockstep explain steps study/scaling.jsonl")
    if program and not command.tries:
        raise ConfigError(f"{program[0]}: a command after -- is for --try; add it, or remove the command")
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
    if command.tries:
        if len(verdicts) > 1 or not material.runs:
            raise ConfigError("--try: expected the records of one run, not of several or of a study")
        return _try(material.runs[0], program, command.json)
    for name, verdict in verdicts:
        if command.json:
            print(json.dumps({"name": name, **verdict.to_mapping()}))
        else:
            print(printable(f"{name}:"), *map(printable, verdict.lines), sep="\n")
    return 0


def _try(run: Run, program: Sequence[str], as_json: bool) -> int:
    """Print what bounds the steps of a run, and what its best changes save when they are tried."""
    from lockstep.cli.explain_trials import EndedError, describe, to_mappings, try_changes
    from lockstep.cli.recorded_program import recorded_program
    from lockstep.report.step_changes import MAX_CHANGES, untested_changes
    from lockstep.report.step_verdict import explain

    assert run.measured is not None
    verdict, recorded = explain(run.measured), recorded_program(run, program)
    if not as_json:
        print(printable(f"{run.name}:"), *map(printable, verdict.lines), sep="\n", flush=True)
    untested = untested_changes(verdict.bound, run.measured, recorded.config)
    kinds = [change.kind for change in verdict.changes]
    changes = [*verdict.changes, *(change for change in untested if change.kind not in kinds)][:MAX_CHANGES]
    try:
        trials = try_changes(recorded, changes, run.measured.seconds)
    except EndedError as ended:
        return ended.code
    if as_json:
        print(json.dumps({"name": run.name, **verdict.to_mapping(), "tried": to_mappings(trials)}))
    else:
        print("tried:" if changes else "nothing to try", *map(printable, describe(trials)), sep="\n")
    return 0
