"""`lockstep explain --try`: run a program with each of the best changes, and compare the time with that predicted."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.cli.recorded_program import FLAG, RecordedProgram, check_hosts
from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.errors import LockstepError, printable
from lockstep.files.jsonl import mapping
from lockstep.files.output import say
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.report.read_steps import facts_of
from lockstep.report.scaling_series import rate_of
from lockstep.report.step_changes import CERTAIN, ProposedChange, percent

TURNS = 3  # of each variant, in alternation
WARMUP = 5  # steps; PowerSGD starts in the third
SECONDS = 5.0  # of measured steps in a turn, within these numbers of steps
MIN_STEPS, MAX_STEPS = 10, 300
PREFETCHED = 2  # batches of each loader process when the training starts
MORE_STEPS = 1_000_000
ELSEWHERE = "not measured, because it is a change of the program itself"
IGNORED = "not measured, because the program sets this itself"


class EndedError(Exception):
    """A signal ended a job; `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Variant:
    """A program as it was started, or with a change.

    Args:
        outside: The change that the workers apply (`lockstep.observe.outside_changes`).
        is_changed: Whether a worker's facts show the change.
    """

    program: RecordedProgram
    outside: str = ""
    is_changed: Callable[[ProgramFacts], bool] = lambda facts: True


@dataclass
class TriedChange:
    """A change, its variant, and the samples per second that were measured; or why there are none."""

    change: ProposedChange | None  # None: the program as it was started
    variant: Variant | None
    rates: list[float] = field(default_factory=list)
    reason: str = ""

    def savings(self, unchanged: Sequence[float]) -> list[float]:
        """Return the share of the time per sample that each turn saves: the median, the least and the most."""
        shares = [1 - before / now for before, now in zip(unchanged, self.rates, strict=False)]
        return [median(shares), min(shares), max(shares)]


def variant_of(change: ProposedChange, program: RecordedProgram) -> Variant | None:
    """Return the program with a change; None if only its author can make the change."""
    if program.config:
        flags = _flags(change, program)
        outside = "powersgd" if change.kind == "powersgd" else ""  # starts early
        return Variant(replace(program, words=(*program.words, *flags)), outside) if flags else None
    if change.kind in ("accumulate", "batch") and program.batch:
        return Variant(replace(program, batch=change.value * program.batch))
    if change.kind == "threads":
        return Variant(replace(program, threads=change.value), "", lambda facts: facts.threads == change.value)
    if change.kind == "loader":
        is_changed = lambda facts: facts.loader_processes == change.value  # noqa: E731
        return Variant(program, f"loader={change.value}", is_changed)
    if change.kind in ("compress", "powersgd") and "hvd" not in change.action:
        return Variant(program, change.kind, lambda facts: facts.exchange == "ddp hook")
    return Variant(program, change.kind) if change.kind == "pin_memory" else None


def _flags(change: ProposedChange, program: RecordedProgram) -> list[str]:
    """Return the flags of `lockstep train` that make a change; none if there are none."""
    config = program.config
    assert config is not None
    times, whole, batch = change.value, config.global_batch_size, config.batch_size
    more = ["--global-batch-size", str(times * whole)] if whole else []
    own = ["--batch-size", str(times * batch)] if batch else more
    flags = {
        "compress": ["--compress", "bf16"],
        "powersgd": ["--compress", "powersgd"],
        "accumulate": [*more, "--accumulate", str(times * config.accumulate)],
        "batch": own,
        "loader": ["--workers", str(change.value)],
        "balance": ["--balance"],
        "channels_last": ["--channels-last"],
        "compile": ["--compile"],
    }
    return flags.get(change.kind, [])


def try_changes(program: RecordedProgram, changes: Sequence[ProposedChange], step_seconds: float) -> list[TriedChange]:
    """Measure each change beside the unchanged program, in turns.

    Args:
        step_seconds: Of the recorded program.

    Raises:
        ConfigError: The program cannot be started as it was.
        EndedError: A signal ended a job.
        LockstepError: Nothing can be measured, because the unchanged program failed.
    """
    unchanged = TriedChange(None, Variant(program))
    tried = [TriedChange(change, variant_of(change, program)) for change in changes]
    for trial in tried:
        trial.reason = "" if trial.variant else ELSEWHERE
    wanted = [unchanged, *(trial for trial in tried if not trial.reason)]
    if len(wanted) == 1:
        return [unchanged, *tried]
    steps = min(MAX_STEPS, max(MIN_STEPS, round(SECONDS / max(step_seconds, 1e-4))))
    processes = max((each.change.value for each in wanted if each.change and each.change.kind == "loader"), default=0)
    length = f"{WARMUP + PREFETCHED * processes},{steps},0,"
    kept = "results go to a temporary folder" if program.config else "what the program itself writes, it writes again"
    say(f"{FLAG}: starts {len(wanted) * TURNS} jobs in turn, and ends each after about {steps} steps; {kept}")
    say(printable(f"{FLAG}: {shlex.join(program.words)}"))
    with JobSeries() as jobs, tempfile.TemporaryDirectory() as scratch:
        for turn in range(TURNS):
            for number, trial in enumerate(wanted):
                if not trial.reason:
                    _measure(trial, jobs, length, steps, Path(scratch, f"{turn}-{number}"))
                if unchanged.reason:
                    raise LockstepError(f"{FLAG}: the unchanged program cannot be measured: {unchanged.reason}")
    return [unchanged, *tried]


def _measure(trial: TriedChange, jobs: JobSeries, length: str, steps: int, scratch: Path) -> None:
    """Measure a variant for one turn.

    Raises:
        EndedError: A signal ended the job.
    """
    from lockstep.study.step_jobs import measure_in_job

    variant = trial.variant
    assert variant is not None
    plan = _plan(variant, f"{length},{variant.outside}" if variant.outside else length, steps, scratch)
    outcome = measure_in_job(plan, jobs, variant.program.workers)
    if outcome.was_ended:
        raise EndedError(outcome.code)
    rate = rate_of(outcome.figures) if outcome.figures else None
    if rate is None:
        trial.reason = f"not measured: {outcome.reason or 'its rate is unknown'}"
    elif not variant.is_changed(facts_of(mapping(outcome.figures, "program"))):
        trial.reason = IGNORED
    else:
        trial.rates.append(rate)
    name = trial.change.kind if trial.change else "unchanged"
    result = trial.reason or f"{1000 / outcome.figures['steps_per_second']:.3g} ms per step"
    say(printable(f"{FLAG}: {name}: {result}"))


def _plan(variant: Variant, length: str, steps: int, scratch: Path) -> JobPlan:
    from lockstep.study.points import StepPoint, measured_flags
    from lockstep.study.step_jobs import plan_measurement

    program, words = variant.program, list(variant.program.words)
    if config := program.config:
        words += measured_flags(config, steps + WARMUP)
        words += ["--max-steps", str(MORE_STEPS)] if config.max_steps else []
    batch = program.batch and program.batch * program.workers
    point = StepPoint(program.workers, batch, (), 0)
    plan = plan_measurement(program.where, point, words, length, scratch, program.workers)
    check_hosts(program, len(plan.nodes))
    threads = {"OMP_NUM_THREADS": str(program.threads)} if program.threads else {}
    return replace(plan, environment={**plan.environment, **threads})


def judge(change: ProposedChange, savings: Sequence[float]) -> str:
    """Return what was measured of a change, beside what was predicted."""
    middle, least, most = savings
    measured = f"measured {percent(middle)} ({percent(least)} to {percent(most)})"
    if not change.high:
        return f"{measured}, without a prediction{'' if least > CERTAIN else '; it does not help'}"
    predicted = f"predicted {percent(change.gain)} ({percent(change.low)} to {percent(change.high)}), {measured}"
    if least <= CERTAIN:
        return f"{predicted}; it does not help here"
    below, above = most < change.low, least > change.high
    return f"{predicted}{'; less than predicted' if below else '; more than predicted' if above else ''}"


def describe(trials: Sequence[TriedChange]) -> list[str]:
    """Return a line for each change that was to be tried."""
    unchanged, *tried = trials
    lines = []
    for number, trial in enumerate(tried, start=1):
        assert trial.change is not None
        result = trial.reason or judge(trial.change, trial.savings(unchanged.rates))
        how = f": {trial.change.action}" if trial.reason or not trial.change.high else ""
        lines.append(f"  {number}. {result}{how}")
    return lines


def to_mappings(trials: Sequence[TriedChange]) -> list[Mapping[str, Any]]:
    """Return the same for programs."""
    found: list[Mapping[str, Any]] = []
    for trial in trials[1:]:
        assert trial.change is not None
        saving = dict(zip(("gain", "low", "high"), trial.savings(trials[0].rates), strict=True)) if trial.rates else {}
        found.append({"kind": trial.change.kind, "reason": trial.reason, **saving})
    return found
