"""Points of a scaling study of any program, and the figures of its workers, who measure their own steps.

The workers' side is `lockstep.world.measurement`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lockstep.diagnosis.phases import BEFORE_BACKWARD, WAITING
from lockstep.errors import ConfigError, plural
from lockstep.study.points import Mode, StepPoint, check_counts, shuffled
from lockstep.world.machine import describe_commits

PARTS = {  # of a step, by the phase of a program's step
    "data_wait": "data_wait",
    "forward": "forward",
    "backward": "backward",
    WAITING: "communication_exposed",
    "optimizer": "optimizer",
    BEFORE_BACKWARD: "other",
}
MAX_LABEL = 60  # characters of the command, in legends


def fill_in(command: Sequence[str], point: StepPoint, nodes: int, run: Path) -> tuple[str, ...]:
    """Return the command with {np}, {nodes}, {run} and {batch}, the batch size per worker, filled in."""
    values = {"np": point.workers, "nodes": nodes, "run": run}
    if point.global_batch is not None:
        values["batch"] = point.global_batch // point.workers
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", str(value))
        filled.append(word)
    return tuple(filled)


def is_program(command: Sequence[str]) -> bool:
    """Whether the words are a command to run, and not the arguments of `lockstep train`."""
    return bool(command) and not command[0].startswith("-") and shutil.which(command[0]) is not None


def plan_program_points(
    command: Sequence[str], counts: Sequence[int], mode: Mode, global_batch: int | None, repeats: int, seed: int
) -> list[StepPoint]:
    """Plan the measurements of a program, as `shuffled` does.

    Raises:
        ConfigError: A number of workers is given twice, or the global batch cannot be divided, or is not used.
    """
    takes_batch = any("{batch}" in word for word in command)
    check_counts(counts)
    if takes_batch and global_batch is None:
        raise ConfigError("{batch} in the command needs --global-batch N, the samples per step of all workers")
    if global_batch is not None:
        if not takes_batch:
            raise ConfigError("--global-batch needs {batch} in the command, such as: -- python train.py -b {batch}")
        for workers in counts:
            if global_batch % workers:
                raise ConfigError(f"--global-batch {global_batch}: must be a multiple of {workers} workers")
    return shuffled([(workers, global_batch, (mode,)) for workers in sorted(counts)], repeats, seed)


def about_program(command: Sequence[str], mode: Mode, global_batch: int | None) -> dict[str, Any]:
    """Return the fields that identify a program in records: a digest, a label and the command."""
    whole = json.dumps([list(command), os.getcwd(), mode, global_batch])
    text = " ".join(command)
    label = text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"
    return {"job": hashlib.sha256(whole.encode()).hexdigest()[:8], "label": label, "flags": list(command)}


def figures_of(by_worker: Sequence[Mapping[str, Any]], workers: int) -> dict[str, Any]:
    """Return the record's fields from what all workers have measured.

    Raises:
        ValueError: Workers sent nothing, or each of several trained alone; the message says so.
    """
    if len(by_worker) < workers:
        sent = f"{len(by_worker)} of {plural(workers, 'worker')} measured any steps"
        raise ValueError(f"{sent}; a step is a call of a torch optimizer's step(), or of lockstep.step()")
    if workers > 1 and not all(figures["connected"] for figures in by_worker):
        raise ValueError("the workers are independent programs: they created no process group")
    rates = [figures["samples_per_second"] for figures in by_worker]
    steps = median(figures["steps_per_second"] for figures in by_worker)
    rate = {}
    if None not in rates:  # reports take the first rate
        batches = [figures["samples_per_second"] / figures["steps_per_second"] for figures in by_worker]
        rate = {"samples_per_second": sum(rates), "samples_per_step": sum(batches)}
    phases = [figures["phase_seconds"] for figures in by_worker]
    shares = [figures["utilization"] for figures in by_worker]
    gpus = dict.fromkeys(sorted(figures["gpu"] for figures in by_worker if figures["gpu"]))
    return {
        **rate,
        "steps_per_second": steps,
        "step_seconds": {
            part: fmean(figures["step_seconds"][part] for figures in by_worker) for part in ("low", "median", "high")
        },
        "split_seconds": {part: fmean(seconds.get(phase, 0.0) for seconds in phases) for phase, part in PARTS.items()},
        "measured_steps": min(figures["measured_steps"] for figures in by_worker),
        "peak_memory_bytes": max(figures["peak_memory_bytes"] for figures in by_worker),
        "memory": by_worker[0]["memory"],
        **({} if None in shares else {"utilization": fmean(shares)}),
        "device": by_worker[0]["device"],
        **({"gpu": ", ".join(gpus)} if gpus else {}),
        **_environment(by_worker),
    }


def _environment(by_worker: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first worker's machine and the commits, and the usable cores, as in the records of other jobs."""
    machine = next((figures["environment"] for figures in by_worker if figures["environment"]), None)
    if machine is None:
        return {}
    return {"cores": machine["cores"], "environment": {**machine, **describe_commits()}}
