"""How a program was started, from the records of its run, so that `lockstep explain --try` can start it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median

from lockstep.cli.parse import TrainCommand, parse_train, read
from lockstep.cli.run import RunCommand, split
from lockstep.config.legacy_flags import translate
from lockstep.config.run_paths import is_training, without_beginning
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, plural
from lockstep.files.jsonl import count, text, texts
from lockstep.launch.plan.options import LaunchOptions
from lockstep.report.run import Run

FLAG = "--try"
BATCH = "{batch}"


@dataclass(frozen=True)
class RecordedProgram:
    """A program as it was started.

    Args:
        words: The workers' command; {run} stands for an unused folder.
        threads: Of each worker; 0: unknown.
        batch: Samples of a worker's step, which replace {batch}; None if the command does not have it.
        config: Of `lockstep train`.
    """

    words: tuple[str, ...]
    where: LaunchOptions
    workers: int
    hosts: int
    threads: int = 0
    batch: int | None = None
    config: TrainConfig | None = None


def recorded_program(run: Run, typed: Sequence[str]) -> RecordedProgram:
    """Return the program of a run.

    Args:
        typed: A command to use instead of the recorded one, with {batch} for the samples of a worker's step.

    Raises:
        ConfigError: The records do not show how it was started, or it cannot be started in that way again.
    """
    workers, hosts = count(run.start, "workers") or 1, count(run.start, "hosts") or 1
    folder = text(run.start, "folder") or text(run.environment, "folder")
    if folder and not typed and Path(folder) != Path.cwd():
        raise ConfigError(f"{FLAG} starts the program where it was started; first: cd {shlex.quote(folder)}")
    if program := text(run.start, "program"):
        started = shlex.split(text(run.start, "command") or "")
        at = next((place for place, word in enumerate(started[:4]) if word == "run"), None)
        flags = split(started[at + 1 :])[0] if at is not None and "lockstep" in started[:at] else []
        where = read(RunCommand, "run", flags).where
        words = tuple(typed) or tuple(shlex.split(program))
        threads = run.measured.facts.threads if run.measured else 0
        found = RecordedProgram(words, where, workers, hosts, threads, _batch(run, words, workers))
    else:
        found = _training(run, typed, workers, hosts)
    if found.where.is_manual:
        raise ConfigError(f"{FLAG} starts all workers: record the job with -H HOSTS instead of --nodes or --dist-url")
    return found


def _batch(run: Run, words: Sequence[str], workers: int) -> int | None:
    if not any(BATCH in word for word in words):
        return None
    samples, steps = (run.steps.get(name) for name in ("images_per_second", "steps_per_second"))
    if not samples or not steps:
        raise ConfigError(f"{BATCH}: the records do not show the samples of a step; leave it out")
    rate, every = (median(filter(isfinite, each.values)) for each in (samples, steps))  # the last batch may be smaller
    return max(1, round(rate / every / workers))


def _training(run: Run, typed: Sequence[str], workers: int, hosts: int) -> RecordedProgram:
    started = texts(run.environment, "command")
    if not is_training(started):
        raise ConfigError(
            f"{FLAG} is for `lockstep train` and programs with records from --observe-dir; {run.path} has neither's"
        )
    if typed:
        raise ConfigError(f"{FLAG} repeats {run.path} by its recorded flags; leave out {shlex.join(typed)}")
    kept = shlex.split(without_beginning(shlex.join(started)))
    flags = translate(kept[kept.index("train") + 1 :], TrainCommand).arguments
    command = parse_train(flags)
    words = (command.where.python_of_workers, "-m", "lockstep", "train", *flags)
    return RecordedProgram(words, command.where, workers, hosts, config=command.job)


def check_hosts(program: RecordedProgram, nodes: int) -> None:
    """Raise ConfigError if a plan with so many nodes is not where the program ran."""
    if (nodes > 1) != (program.hosts > 1):
        ran = f"{plural(program.workers, 'worker')} on {plural(program.hosts, 'host')}"
        raise ConfigError(f"{FLAG} would start {ran} on {nodes}, which shows nothing; record the job with -H HOSTS")
