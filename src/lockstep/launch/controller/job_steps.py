"""The steps of a job's workers: names those that slow the others down, and writes records like those of a run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.config.run_paths import typed_command
from lockstep.diagnosis.observed_steps import PHASES, ObservedSteps, joined
from lockstep.diagnosis.stragglers import ReportComparison, rounded, spread_of
from lockstep.errors import ConfigError
from lockstep.files.jsonl import RecordWriter
from lockstep.files.output import say
from lockstep.launch.protocol.messages import StepsObserved

RECORDS = "metrics.jsonl"
RECORD_SECONDS = 1.0  # between two records, at least


class JobSteps:
    """What is observed of the workers' steps, over all starts of the job.

    Args:
        program: The workers' command.
        folder: Where to write metrics.jsonl, or None.

    Raises:
        ConfigError: The folder has files, or cannot be written.
    """

    def __init__(self, program: Sequence[str], folder: Path | None = None) -> None:
        self._program = shlex.join(program)
        self._folder = folder
        self._writer = _writer_in(folder) if folder else None
        self._processes: dict[tuple[int, int, int], ObservedSteps] = {}  # by start, rank and process
        self._hosts: Sequence[str] = ()
        self._start, self._began = 0, time.monotonic()
        self._recorded: dict[int, ObservedSteps] = {}  # by rank, in the last record
        self._recorded_time = self._began

    def begin(self, hosts: Sequence[str]) -> None:
        """Prepare for a start of the workers.

        Args:
            hosts: The host of each rank.
        """
        self._start += 1
        self._hosts = hosts
        self._comparison = ReportComparison(hosts)
        self._met: set[int] = set()  # ranks that wait for others; the steps of independent programs are not compared
        self._oversubscribed = [False] * len(hosts)
        self._recorded = self._present()
        about = {"workers": len(hosts), "hosts": len(set(hosts)), "program": self._program, "command": typed_command()}
        self._record("run", {**about, "step": self._step(self._recorded)})

    def add(self, message: StepsObserved) -> None:
        """Add what a host has sent: name slow workers, and write a record if it is due."""
        for each in message.processes:
            if each.rank < len(self._hosts):
                self._processes[self._start, each.rank, each.pid] = each.steps
                self._oversubscribed[each.rank] = message.oversubscribed
                self._met |= {each.rank} if each.met else set()
        if 1 < len(self._met) == len(self._hosts):
            workers = [self._newest(rank) for rank in range(len(self._hosts))]
            for straggler in self._comparison.compare(workers, self._oversubscribed):
                say(f"lockstep: {straggler.describe()}; {straggler.advice}")
                self._record("straggler", {**asdict(straggler), "step": self._step(self._present())})
        if time.monotonic() - self._recorded_time >= RECORD_SECONDS:
            self._record_steps()

    def _newest(self, rank: int) -> ObservedSteps:
        """Return the steps of a worker's process that has taken most of them in this start."""
        own = [steps for (start, each, _), steps in self._processes.items() if (start, each) == (self._start, rank)]
        return max(own, key=lambda steps: steps.steps, default=ObservedSteps())

    def by_rank(self) -> dict[int, ObservedSteps]:
        """Return the sums of each rank that has taken steps."""
        ranks = sorted({rank for _, rank, _ in self._processes})
        own = {rank: [steps for (_, each, _), steps in self._processes.items() if each == rank] for rank in ranks}
        found = {rank: joined(processes) for rank, processes in own.items()}
        return {rank: steps for rank, steps in found.items() if steps.steps}

    def _present(self) -> dict[int, ObservedSteps]:
        """Return `by_rank` without ranks that the last start of the workers has no more."""
        return {rank: steps for rank, steps in self.by_rank().items() if rank < len(self._hosts)}

    def close(self, code: int | None) -> None:
        """Write the last records.

        Args:
            code: The job's exit code; None if it could not be started.
        """
        self._record_steps()
        now = self._present()
        step = {"step": self._step(now)}
        if now and len(now) == len(self._hosts):
            sums = zip(*(steps.phase_seconds for steps in now.values()), strict=True)
            seconds = {phase: rounded(column) for phase, column in zip(PHASES, sums, strict=True) if any(column)}
            self._record("epoch", {"split": "train", **step, "phase_seconds": seconds})
        self._record("end", {**step, "exit_code": code})
        if self._writer:
            self._writer.close()

    def _step(self, now: Mapping[int, ObservedSteps]) -> int:
        return min((steps.steps for steps in now.values()), default=0)

    def _record_steps(self) -> None:
        """Write what all ranks have done since the last record, once each has done some steps."""
        now = self._present()
        new = [_since(steps, self._recorded.get(rank, ObservedSteps())) for rank, steps in now.items()]
        if not new or len(new) < len(self._hosts) or not all(steps.timed_steps for steps in new):
            return
        self._recorded, self._recorded_time = now, time.monotonic()
        columns = {phase: [steps.per_step.get(phase, 0.0) for steps in new] for phase in PHASES}
        columns = {phase: column for phase, column in columns.items() if any(column)}
        rates = [(steps.samples or 0) / steps.interval_seconds for steps in new if steps.interval_seconds]
        whole = sum(new[0].per_step.values())
        self._record(
            "step",
            {
                "step": self._step(now),
                **({"images_per_second": sum(rates)} if all(steps.samples for steps in new) else {}),
                "steps_per_second": median(steps.steps_per_second for steps in new),
                **({"data_wait": columns.get("data_wait", [0.0])[0] / whole} if whole else {}),
                "phase_spread": {phase: spread_of(each) for phase, each in columns.items()},
                "phase_seconds": {phase: rounded(each) for phase, each in columns.items()},
            },
        )

    def _record(self, kind: str, fields: Mapping[str, Any]) -> None:
        if not self._writer:
            return
        seconds = time.monotonic() - self._began
        try:
            self._writer.write({"kind": kind, "time_seconds": seconds, "unix_time": time.time(), **fields})
        except OSError as error:
            say(f"lockstep: {self._folder}: {error.strerror}; the job's steps are not recorded any more")
            with suppress(OSError):
                self._writer.close()
            self._writer = None


def _writer_in(folder: Path) -> RecordWriter:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--observe-dir {folder}: exists and is not an empty folder; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return RecordWriter(folder / RECORDS)
    except OSError as error:
        raise ConfigError(f"--observe-dir {folder}: {error.strerror}") from None


def _since(now: ObservedSteps, before: ObservedSteps) -> ObservedSteps:
    """Return what has come to the sums of a rank."""
    samples = None if now.samples is None else now.samples - (before.samples or 0)
    return ObservedSteps(
        now.steps - before.steps,
        samples,
        now.interval_steps - before.interval_steps,
        now.timed_steps - before.timed_steps,
        now.interval_seconds - before.interval_seconds,
        tuple(late - early for late, early in zip(now.phase_seconds, before.phase_seconds, strict=True)),
    )
