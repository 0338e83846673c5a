"""`lockstep stacks`: what every worker of a running job is doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.diagnosis.explanation import Group, grouped, ranks_text
from lockstep.diagnosis.inspection import WorkerState
from lockstep.errors import ConfigError, WorldError
from lockstep.files.untrusted import printable_name
from lockstep.launch.controller.stack_server import ask, launchers

MAX_FRAMES = 8
WIDTH = 100


@dataclass(frozen=True)
class StacksCommand:
    """Show what every worker of a running job is doing: its step, its collective and its Python stack.

    Workers with the same stack are shown together. The job is not interrupted. Run this on the launcher's host.
    """

    job: Annotated[Positional[int | None], arg(metavar="PID")] = None
    """Process number of a launcher. Default: all your jobs on this host."""
    full: bool = False
    """Show all frames, not only the innermost eight."""
    json: bool = False
    """Print one JSON object per job, with all frames of each group of workers."""


def main(arguments: Sequence[str]) -> int:
    command = parse(StacksCommand, "stacks", arguments)
    jobs = launchers()
    if command.job is not None and command.job not in jobs:
        known = f"the launchers on this host are {', '.join(map(str, jobs))}" if jobs else "no job runs on this host"
        raise ConfigError(f"{command.job}: not one of your launchers; {known}")
    if not jobs:
        raise ConfigError("no job runs on this host; run this on the host where you started the job")
    chosen = jobs if command.job is None else [command.job]
    for number, pid in enumerate(chosen):
        if number and not command.json:
            print()
        try:
            typed, workers = ask(pid)
        except OSError as error:
            silent = f"launcher {pid} does not respond: {error}"
            if len(chosen) == 1:
                raise WorldError(silent) from None
            print(json.dumps({"process": pid, "error": str(error)}) if command.json else silent)
            continue
        if command.json:
            print(json.dumps({"process": pid, "command": typed, "groups": _to_mappings(workers)}))
            continue
        _print_job(f"{typed} · process {pid}", workers, None if command.full else MAX_FRAMES)
    return 0


def _to_mappings(workers: Sequence[tuple[str, WorkerState]]) -> list[dict[str, Any]]:
    """Return the groups of workers for programs, each stack with its innermost frame first."""
    hosts = {state.rank: host for host, state in workers}
    groups = grouped([state for _, state in workers])
    return [{**asdict(group), "hosts": sorted({hosts[rank] for rank in group.ranks} - {""})} for group in groups]


def _print_job(title: str, workers: Sequence[tuple[str, WorkerState]], most_frames: int | None) -> None:
    print(printable_name(title))
    hosts = {state.rank: host for host, state in workers}
    if not workers:
        print("its workers have not started yet, or do not report their state")
    for group in grouped([state for _, state in workers]):
        print(f"\n{printable_name(_heading(group, hosts))}")
        for line in _frames(group, most_frames):
            print(printable_name(line))


def _heading(group: Group, hosts: dict[int, str]) -> str:
    named = sorted({hosts[rank] for rank in group.ranks if hosts[rank]})
    where = f" on {', '.join(named)}" if named else ""
    return f"{ranks_text(group.ranks)}{where} · {group.doing}"


def _frames(group: Group, most: int | None) -> list[str]:
    stack = group.stack
    lines = [f"  {frame.function} ({_shortened(frame.file)}:{frame.line})" for frame in stack[:most]]
    more = len(stack) - len(lines)
    return [*lines, *([f"  ... {more} more; --full shows them"] if more else [])]


def _shortened(path: str) -> str:
    return path if len(path) <= WIDTH - 40 else f"...{path[-(WIDTH - 43) :]}"
