"""The steps of a job's workers: names those that slow the others down, and writes records like those of a run."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from operator import ne
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lockstep.config.run_paths import typed_command
from lockstep.diagnosis.observed_steps import PHASES, ObservedSteps, ProcessSteps, transfer_seconds
from lockstep.diagnosis.oversubscription import BusyCores
from lockstep.diagnosis.stragglers import Straggler, StragglerWatch, rounded, spread_of
from lockstep.errors import ConfigError
from lockstep.files.io_records import append_record
from lockstep.files.io_totals import OF_NODE, IoTotals
from lockstep.files.jsonl import RecordWriter
from lockstep.files.output import say
from lockstep.observe.link_comparison import LinkComparison, SlowLink
from lockstep.script_check.state_comparison import StateComparison

RECORDS = "metrics.jsonl"
KEPT_RECORDS = 100


class JobSteps:
    """What is observed of the workers' steps, over all generations of the job.

    Args:
        program: The workers' command.
        folder: Where to write metrics.jsonl once the workers have started, or None.

    Raises:
        ConfigError: The folder has files, or cannot be made.

    Attributes:
        kept: The last `run` record and the newest others, also without a folder.
        stragglers, findings: All of these records' fields.
        where: For `run` records, the `folder` in which the program was started, if it is known.
    """

    def __init__(self, program: Sequence[str], folder: Path | None = None, record_seconds: float = 1.0) -> None:
        if folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"folder of records {folder}: exists and is not an empty folder; choose another")
        try:
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder of records {folder}: {error.strerror}") from None
        self._program, self.where = shlex.join(program), dict[str, str]()
        self._folder, self._record_seconds = folder, record_seconds
        self._writer: RecordWriter | None = None
        self.kept: list[Mapping[str, Any]] = []
        self.stragglers: list[Mapping[str, Any]] = []
        self.findings: list[str] = []
        self._earlier: dict[int, ObservedSteps] = {}  # by rank, the sums of earlier generations
        self._processes: list[dict[int, ObservedSteps]] = []  # by rank; the newest process is the last
        self.joules, self._recorded_joules = Counter[str](), Counter[str]()  # of all hosts, by kind
        self.not_counted: list[str] = []
        self._expect([])

    def _expect(self, hosts: Sequence[str]) -> None:
        """Prepare for the workers of a generation."""
        self._has_begun = False  # all workers have taken steps
        self._earlier = self.by_rank()
        self._processes = [{} for _ in hosts]
        self._oversubscribed = [False] * len(hosts)
        self._hosts, self._devices = hosts, dict[str, int]()  # by host, the rank that counts its devices
        self._io: dict[tuple[int, int], IoTotals] = {}  # what is recorded, by rank and process
        self._met: set[int] = set()  # ranks that wait for others; the steps of independent programs are not compared
        self._states = StateComparison(len(hosts))
        self._watch, self._links = StragglerWatch(hosts), LinkComparison(hosts)
        self._compared = [0] * len(hosts)  # the number of each rank's last report in a comparison
        self._start = self._recorded = self._totals()
        self._busy_cores, self._gpu_use = BusyCores(), list[float]()
        self._recorded_time = time.monotonic()

    def begin(self, hosts: Sequence[str]) -> None:
        """Follow the workers of a generation, given the host of each rank."""
        self._end_generation()
        if self._folder and not self._writer:
            try:
                self._writer = RecordWriter(self._folder / RECORDS)
            except OSError as error:
                self._give_up(error)
        self._expect(hosts)
        about = {"workers": len(hosts), "hosts": len(set(hosts)), "program": self._program, "command": typed_command()}
        self._record("run", about | self.where)

    def add(self, processes: Sequence[ProcessSteps], oversubscribed: bool) -> None:
        """Add steps of workers of a host, which may be oversubscribed: name what is slow, and write a record if due."""
        for each in processes:
            if each.rank >= len(self._processes):
                continue
            self._record_io(each)
            if not each.steps.steps:  # only its I/O is known yet
                continue
            own = self._processes[each.rank]
            if own.get(each.pid) != each.steps:
                own.pop(each.pid, None)
                own[each.pid] = each.steps
            self._oversubscribed[each.rank] = oversubscribed
            self._met |= {each.rank} if each.met else set()
        newest = [[*own.values()][-1] for own in self._processes if own]
        if 1 < len(newest) == len(self._processes):
            for finding in self._states.compare([steps.state for steps in newest]):
                say(f"lockstep: {finding}. To find the cause: lockstep check -- {self._program}")
                self._record("finding", {"text": finding})
                self.findings.append(finding)
        reports = [steps.report for steps in newest]
        if 1 < len(self._met) == len(self._processes) == len(newest) and all(map(ne, reports, self._compared)):
            self._compared = reports
            stragglers = self._watch.compare(newest, self._oversubscribed)
            self.stragglers += map(asdict, stragglers)
            self._name([*stragglers, *self._links.compare([steps.links for steps in newest])])
        if not self._has_begun and len(newest) == len(self._processes):
            self._has_begun = True
            self._gpu_use.clear()
            self._record_energy(0)  # of the start of the workers
        if time.monotonic() - self._recorded_time >= self._record_seconds:
            self._record_steps()

    def _name(self, found: Sequence[Straggler | SlowLink]) -> None:
        for each in found:
            say(f"lockstep: {each.describe()}; {each.advice}")
            fields = asdict(each).items()  # as lists, which those read who explain the kept records
            self._record(each.kind, {name: [*value] if isinstance(value, tuple) else value for name, value in fields})

    def _record_io(self, process: ProcessSteps) -> None:
        """Record the I/O of a worker's process since the last record, and that of each host's devices once."""
        rank, totals = process.rank, process.steps.io
        before = self._io.get((rank, process.pid), IoTotals())
        if not self._folder or not self._writer or totals.seconds <= before.seconds:
            return
        self._io[rank, process.pid] = totals
        record = totals.record(rank, before)
        devices = {name for name in record if name.startswith(OF_NODE)}
        if devices and self._devices.setdefault(self._hosts[rank], rank) != rank:
            record = {name: amount for name, amount in record.items() if name not in devices}
        try:
            append_record(self._folder, record)
        except OSError as error:
            self._give_up(error)

    def _totals(self) -> list[ObservedSteps]:
        """Return the sums of each rank of this generation, with those of earlier ones."""
        return [
            reduce(ObservedSteps.plus, own.values(), self._earlier.get(rank, ObservedSteps()))
            for rank, own in enumerate(self._processes)
        ]

    @property
    def is_recorded(self) -> bool:
        return self._writer is not None

    def by_rank(self) -> dict[int, ObservedSteps]:
        """Return the sums of each rank that has taken steps in any generation."""
        found = self._earlier | dict(enumerate(self._totals()))
        return {rank: steps for rank, steps in sorted(found.items()) if steps.steps}

    def close(self, code: int | None) -> None:
        """Write the last records, with the job's exit code; None if an error ended it."""
        self._end_generation()
        self._record("end", {"exit_code": code})
        if self._writer:
            self._writer.close()

    def _end_generation(self) -> None:
        """Write the records of the end of a generation."""
        self._record_steps()
        self._record_energy(0)
        self._record_program()
        sums = [now.plus(before, -1) for now, before in zip(self._totals(), self._start, strict=True)]
        if sums and all(steps.timed_steps for steps in sums):
            columns = zip(PHASES, zip(*(steps.phase_seconds for steps in sums), strict=True), strict=True)
            seconds = {phase: rounded(column) for phase, column in columns if any(column)}
            self._record("epoch", {"split": "train", "phase_seconds": seconds})

    def _record_steps(self) -> None:
        """Write what all ranks have done since the last record, once each has done some steps."""
        now = self._totals()
        new = [steps.plus(before, -1) for steps, before in zip(now, self._recorded, strict=True)]
        if any(steps.steps < 0 for steps in new):  # a program starts to say when it takes a step
            self._recorded = now
        if not new or not all(steps.interval_steps > 0 for steps in new):
            return
        self._recorded, self._recorded_time = now, time.monotonic()
        columns = {phase: [steps.per_step.get(phase, 0.0) for steps in new] for phase in PHASES}
        columns = {phase: column for phase, column in columns.items() if any(column)}
        rates = [rate for steps in new if (rate := steps.samples_per_second) is not None]
        whole = sum(new[0].per_step.values())
        self._record(
            "step",
            {
                **({"images_per_second": sum(rates)} if len(rates) == len(new) else {}),
                "steps_per_second": median(steps.steps_per_second for steps in new),
                **({"data_wait": columns.get("data_wait", [0.0])[0] / whole} if whole else {}),
                "phase_spread": {phase: spread_of(each) for phase, each in columns.items()},
                "phase_seconds": {phase: rounded(each) for phase, each in columns.items()},
                "busy_cores": self._busy_cores.take(),
                **({"gpu_use": round(fmean(self._gpu_use), 3)} if self._gpu_use else {}),
            },
        )
        self._gpu_use.clear()
        self._record_energy(sum(steps.interval_samples for steps in new) if len(rates) == len(new) else 0)

    def add_energy(self, joules: Mapping[str, float], unread: Sequence[str], gpu_use: Sequence[float] = ()) -> None:
        """Add what a host has used since it was added last, what is not counted there, and how busy its GPUs are."""
        self.joules.update(joules)
        self._gpu_use += gpu_use
        if new := [line for line in unread if line not in self.not_counted]:
            self.not_counted += new
            self._record("energy", {"joules": {}, "unread": new})

    def _record_energy(self, samples: int) -> None:
        """Write the energy since the last record, of so many samples."""
        if new := self.joules - self._recorded_joules:
            self._recorded_joules = Counter(self.joules)
            self._record("energy", {"joules": dict(new), "samples": samples})

    def _record_program(self) -> None:
        """Write the facts of rank 0's program, and the time of an exchange without waiting for workers."""
        newest = [[*own.values()][-1] for own in self._processes if own]
        if newest and len(newest) == len(self._processes):
            waited = transfer_seconds(steps.waits for steps in newest) if len(newest) > 1 else None
            self._record("program", {**asdict(newest[0].facts), "transfer_seconds": waited})

    def _record(self, kind: str, fields: Mapping[str, Any]) -> None:
        totals = self._totals()
        step = min((steps.steps for steps in totals), default=0)
        seconds = max((steps.interval_seconds for steps in totals), default=0.0)  # without the first steps
        record = {"kind": kind, "step": step, "time_seconds": seconds, "unix_time": time.time(), **fields}
        self.kept = [record] if kind == "run" else [*self.kept[:1], *self.kept[1:][-KEPT_RECORDS:], record]
        try:
            if self._writer:
                self._writer.write(record)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        say(f"lockstep: {self._folder}: {error.strerror}; the job's steps are not recorded")
        with suppress(OSError):
            if self._writer:
                self._writer.close()
        self._writer = self._folder = None
