"""What bounds a step, in at most three lines: the bottleneck with the figures, and the two best changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.errors import bit_rate, plural
from lockstep.report.measured_step import MeasuredStep, SlowRank, find_slow_rank, parts_of_step
from lockstep.report.step_changes import IDLE, WORTH, ProposedChange, best_changes, percent

MAX_DIFFERENCE = 0.15  # of two halves of a run, or of repeats; with more there is no verdict
MIN_STEPS = 50
SLOW_LINK = 1.25e8  # bytes per second between hosts: 1 Gbit/s
TEXTS = {
    "data": "waiting for data bounds the step: {part}, {loader}",
    "computing": "computing bounds the step: {part}{threads}",
    "threads": "too many threads bound the step: {part} of computing{threads} for {local} workers",
    "small batch": "the small batch bounds the step: {part} of computing, of which about {fixed} for any batch",
    "forward or other work": "forward, loading or other work bounds the step: {part} before backward; a DataLoader "
    "would tell them apart",
    "other work": "other work bounds the step: {part} outside of loading, the two passes and the optimizer",
    "exchange": "the exchange of gradients bounds the step: {part}{bytes}",
    "slow link": "a slow link bounds the step: {part} for the exchange{bytes}{link}",
    "idle GPU": "an idle GPU bounds the step: it computes in {busy} of the time, and no wait explains the rest",
    "slow worker": "one slow worker bounds the step: rank {rank} takes {part} longer than the others, mostly {where}",
    "uneven steps": "uneven steps bound it: {part} of waiting for the last worker, another one each time",
}


@dataclass(frozen=True)
class StepVerdict:
    """The bottleneck of a step.

    Args:
        bound: Its kind; "" if the measurements are too few or too noisy.
        text: A sentence with the figures, or why there is no verdict.
    """

    bound: str
    text: str
    changes: tuple[ProposedChange, ...] = ()

    @property
    def lines(self) -> list[str]:
        """What users read: at most three lines."""
        if self.bound and not self.changes:
            return [f"{self.text}; no known change would save more than {percent(WORTH)}"]
        return [self.text, *(f"  {number}. {each.describe()}" for number, each in enumerate(self.changes, start=1))]

    def to_mapping(self) -> dict[str, Any]:
        return {"bound": self.bound, "text": self.text, "changes": [vars(each) for each in self.changes]}


def explain(step: MeasuredStep) -> StepVerdict:
    """Return what bounds a step, and the best changes."""
    if step.steps < MIN_STEPS or step.difference == math.inf or not step.seconds:
        measured = f"{plural(step.steps, 'step')}, {plural(step.records, 'record')}"
        return StepVerdict(
            "", f"too short to say what bounds the step: {measured}; {MIN_STEPS} steps and 5 s are enough"
        )
    slow = find_slow_rank(step)
    parts = parts_of_step(step, slow)
    part = max(parts, key=lambda part: parts[part])
    bound = _refine(part, step, parts)
    if bound == "threads":  # which wait for cores: that is why the times differ
        step = replace(step, difference=min(step.difference, MAX_DIFFERENCE))
    if step.difference > MAX_DIFFERENCE:
        return StepVerdict("", f"too noisy to say what bounds the step: its times differ by {percent(step.difference)}")
    text = TEXTS[bound].format(part=_of_step(parts[part], step), **_figures(step, slow))
    return StepVerdict(bound, text, best_changes(step, slow))


def _refine(part: str, step: MeasuredStep, parts: Mapping[str, float]) -> str:
    """Return the kind of bottleneck, given the longest part of the step."""
    facts = step.facts
    if part == "exchange" and step.hosts > 1 and (step.slow_links or 0 < _rate(step) < SLOW_LINK):
        return "slow link"
    if step.idle_share > IDLE and part in ("computing", "other work", "forward or other work"):
        return "idle GPU"
    if part == "computing" and step.is_on_cpu and facts.threads * facts.local_workers > facts.cores > 0:
        return "threads"
    if part == "computing" and step.fixed_seconds > 0.5 * parts["computing"]:
        return "small batch"
    return part


def _rate(step: MeasuredStep) -> float:
    """Return the bytes per second that a worker sends in the exchange."""
    return step.wire_bytes / step.transfer if step.transfer else 0.0


def _figures(step: MeasuredStep, slow: SlowRank | None) -> dict[str, Any]:
    facts = step.facts
    loader = {-1: "with an unknown number of loader processes", 0: "as the DataLoader has no processes (num_workers=0)"}
    return {
        "bytes": f", {facts.gradient_bytes / 1e6:.3g} MB at {bit_rate(8 * _rate(step))}" if step.wire_bytes else "",
        "threads": f", with {plural(facts.threads, 'thread')} on {plural(facts.cores, 'core')}"
        if facts.threads and step.is_on_cpu
        else "",
        "link": "" if step.slow_links else "; to measure it: lockstep doctor -H HOSTS",
        "busy": percent(step.gpu_use or 0.0),
        "local": facts.local_workers,
        "fixed": _milliseconds(step.fixed_seconds),
        "loader": loader.get(facts.loader_processes, f"with num_workers={facts.loader_processes}"),
        "rank": slow.rank if slow else "",
        "where": slow.where if slow else "",
    }


def _of_step(seconds: float, step: MeasuredStep) -> str:
    share = min(1.0, seconds / step.seconds)
    return f"{_milliseconds(seconds)} of {_milliseconds(step.seconds)} ({percent(share)})"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
