"""`lockstep stacks`: what every worker of a running job is doing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.diagnosis.explanation import Group, grouped
from lockstep.diagnosis.inspection import WorkerState
from lockstep.errors import ConfigError, WorldError
from lockstep.files.folder_lock import Owner, holder_of
from lockstep.files.untrusted import printable_name
from lockstep.launch.controller.stack_server import ask, launchers

RUN_FILES = ("config.yaml", "metrics.jsonl")
MAX_FRAMES = 8
WIDTH = 100


@dataclass(frozen=True)
class StacksCommand:
    """Show what every worker of a running job is doing: its step, its collective and its Python stack.

    Workers with the same stack are shown together. The job is not interrupted. Run this on the launcher's host.
    """

    job: Annotated[Positional[str | None], arg(metavar="RUN|PID")] = None
    """Run folder, or the launcher's process. Default: all your jobs on this host."""
    full: bool = False
    """Show all frames, not only the innermost eight."""


def main(arguments: Sequence[str]) -> int:
    command = parse(StacksCommand, "stacks", arguments)
    jobs, owner = launchers(), None
    if command.job is None:
        if not jobs:
            raise ConfigError("no job runs on this host; run this on the host where you started the job")
    elif command.job.isdecimal() and not Path(command.job).is_dir():
        jobs = [_launcher(int(command.job), jobs)]
    else:
        owner = _writer_of(Path(command.job))
    shown, silent = 0, ""
    for pid in jobs:
        try:
            typed, workers = ask(pid)
        except OSError as error:
            silent = f"launcher {pid} does not respond: {error}"
            if owner:
                continue
            if len(jobs) == 1:
                raise WorldError(silent) from None
            print(f"{silent}\n")
            continue
        if owner and not any(state.rank == 0 and state.pid == owner.pid for _, state in workers):
            continue
        if shown:
            print()
        shown += 1
        _print_job(f"{typed} · process {pid}", workers, None if command.full else MAX_FRAMES)
    sys.stdout.flush()
    if owner and not shown:
        raise ConfigError(f"{command.job} is in use by {owner}; {_other_way(owner, silent)}")
    return 0


def _launcher(pid: int, jobs: Sequence[int]) -> int:
    if pid not in jobs:
        known = f"the launchers on this host are {', '.join(map(str, jobs))}" if jobs else "no job runs on this host"
        raise ConfigError(f"{pid}: not one of your launchers; {known}")
    return pid


def _writer_of(run: Path) -> Owner:
    """Return the process that writes to a run folder: the worker with rank 0."""
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; pass a run folder or the process number of a launcher")
    owner = holder_of(run)
    if owner is None and not any((run / name).exists() for name in RUN_FILES):
        raise ConfigError(f"{run}: not a run folder; a run folder contains {' or '.join(RUN_FILES)}")
    if owner is None:
        raise ConfigError(f"{run}: no job writes to this run; its last state: lockstep watch {run}")
    return owner


def _other_way(owner: Owner, silent: str) -> str:
    """Return how to see what a worker does that no launcher on this host has named; one of them may be silent."""
    if not owner.is_here:
        return f'run "lockstep stacks" on {owner.host}, or on the host where you started the job'
    return silent or f"Lockstep's launcher did not start it; to see its stack, run: py-spy dump --pid {owner.pid}"


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
    return f"{group.ranks_text}{where} · {group.doing}"


def _frames(group: Group, most: int | None) -> list[str]:
    stack = group.stack
    lines = [f"  {frame.function} ({_shortened(frame.file)}:{frame.line})" for frame in stack[:most]]
    more = len(stack) - len(lines)
    return [*lines, *([f"  ... {more} more; --full shows them"] if more else [])]


def _shortened(path: str) -> str:
    return path if len(path) <= WIDTH - 40 else f"...{path[-(WIDTH - 43) :]}"
