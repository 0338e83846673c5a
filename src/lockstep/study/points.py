"""Plan a study's measurements and batch sizes, and find those already recorded.

A scaling study is of a training job, or of any program, whose workers measure their own steps; `figures_of` joins what
they have measured. The workers' side is `lockstep.world.measurement`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from lockstep.config.mapping import to_mapping
from lockstep.config.schema import RunConfig, TrainConfig
from lockstep.diagnosis.phases import STEP_PARTS
from lockstep.errors import ConfigError, plural
from lockstep.train.optim.schedule import plan_batches
from lockstep.world.machine import describe_commits

KEY = ("job", "workers", "nodes", "threads", "global_batch", "repeat", "steps", "warmup_steps")
Records = Iterable[Mapping[str, Any]]
Mode = Literal["strong", "weak"]
PRECISION = 16  # the largest batch that fits is found to within 1/16
MAX_LABEL = 60  # characters of the command, in legends


@dataclass(frozen=True)
class StepLength:
    """Number of steps to measure, after warm-up steps."""

    steps: int
    warmup_steps: int


@dataclass(frozen=True)
class StepPoint:
    """One measurement: a number of workers, a global batch size, and the number of the repeat, from 0.

    Args:
        global_batch: Samples per step of all workers; None if a program decides.
        modes: What the measurement is part of.
    """

    workers: int
    global_batch: int | None
    modes: tuple[Mode, ...]
    repeat: int

    @property
    def name(self) -> str:
        batch = "" if self.global_batch is None else f", global batch {self.global_batch:,}"
        return plural(self.workers, "worker") + batch

    def to_mapping(self) -> dict[str, Any]:
        return {
            "modes": list(self.modes),
            "workers": self.workers,
            "global_batch": self.global_batch,
            **({} if self.global_batch is None else {"batch": self.global_batch / self.workers}),
            "repeat": self.repeat,
        }


def keeping_nothing(config: TrainConfig) -> TrainConfig:
    """Return the configuration with trackers, checkpoints and the run folder disabled."""
    return replace(config, run=replace(RunConfig(), io_every=0.0, track=()))


def plan_points(
    config: TrainConfig, counts: Sequence[int], modes: Sequence[Mode], repeats: int, seed: int
) -> list[StepPoint]:
    """Plan the measurements of a training job, as `shuffled` does.

    The smallest number runs the job as given and belongs to both modes. Strong scaling keeps the global batch size,
    weak scaling the batch size per worker.

    Raises:
        ConfigError: A number of workers is given twice.
    """
    check_counts(counts)
    smallest = min(counts)
    batch = plan_batches(config, smallest).global_batch
    batches: dict[tuple[int, int], list[Mode]] = {}
    for workers in sorted(counts):
        for mode in modes:
            grown = batch if mode == "strong" else round(batch * workers / smallest)
            batches.setdefault((workers, grown), []).append(mode)
    return shuffled([(workers, grown, tuple(of)) for (workers, grown), of in batches.items()], repeats, seed)


def check_counts(counts: Sequence[int]) -> None:
    """Raise ConfigError if a number of workers is given twice."""
    if len(set(counts)) < len(counts):
        raise ConfigError(f"-np {','.join(map(str, counts))}: must be different numbers of workers")


def shuffled(wanted: Iterable[tuple[int, int | None, tuple[Mode, ...]]], repeats: int, seed: int) -> list[StepPoint]:
    """Plan every measurement `repeats` times, shuffled within each repeat, so that drift affects all equally."""
    points, order = [], random.Random(seed)
    for repeat in range(repeats):
        turn = [StepPoint(*each, repeat) for each in wanted]
        order.shuffle(turn)
        points += turn
    return points


def job_digest(config: TrainConfig) -> str:
    """Return eight hexadecimal digits that identify the job, independent of its batch size and run folder."""
    whole = to_mapping(replace(config, run=RunConfig(), batch_size=None, global_batch_size=None))
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:8]


def missing_points(
    points: Sequence[StepPoint], of: Callable[[StepPoint], Mapping[str, Any]], records: Records
) -> list[StepPoint]:
    """Return the points that lack a successful record in any of their modes.

    Args:
        of: Returns the record fields of a point; the fields in `KEY` identify a measurement.
    """
    modes: dict[tuple[Any, ...], set[str]] = {}
    for record in records:
        if record.get("kind") == "scaling" and "failed" not in record:
            modes.setdefault(key_of(record), set()).update(record.get("modes") or ())
    return [point for point in points if not modes.get(key_of(of(point)), set()).issuperset(point.modes)]


def key_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies a measurement in a file of records."""
    return tuple(record.get(name) for name in KEY)


def next_size(found: Mapping[int, bool], first: int, most: int | None) -> int | None:
    """Return the next batch size to try: double until one does not fit, then bisect; None if the search is complete.

    Args:
        found: Whether each size tried so far fits.
        first: The size to start with.
        most: The largest size to try; None for no limit.
    """
    fitting = max((size for size, fits in found.items() if fits), default=0)
    too_large = min((size for size, fits in found.items() if not fits), default=None)
    if too_large is None:
        wanted = 2 * fitting or first
        if most is not None and wanted > most:
            wanted = most
        return wanted if wanted not in found else None
    between = (fitting + too_large) // 2
    step = max(1, fitting // PRECISION)
    return between if too_large - fitting > step and between > 0 else None


def fill_in(command: Sequence[str], point: StepPoint, nodes: int, run: Path) -> tuple[str, ...]:
    """Return the command with {np}, {nodes}, {run} and {batch}, the batch size per worker, filled in."""
    values = {"np": point.workers, "nodes": nodes, "run": run}
    if point.global_batch is not None:
        values["batch"] = point.global_batch // point.workers
    return tuple(re.sub(r"\{(\w+)\}", lambda name: str(values.get(name[1], name[0])), word) for word in command)


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
        ValueError: Workers sent nothing, or one of several trained alone; the message says so.
    """
    if len(by_worker) < workers:
        sent = f"{len(by_worker)} of {plural(workers, 'worker')} measured any steps"
        raise ValueError(f"{sent}; a step is a call of a torch optimizer's step(), or of lockstep.step()")
    if workers > 1 and not all(figures["connected"] for figures in by_worker):
        raise ValueError("the workers are independent programs: they created no process group")
    steps_made = min(figures["measured_steps"] for figures in by_worker)
    if workers > 1 and any(figures["exchanges"] == 0 for figures in by_worker):
        rare = "(if it averages less often, measure more --steps)"
        raise ValueError(f"no gradients were exchanged in {plural(steps_made, 'step')}: is the model wrapped? {rare}")
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
        "split_seconds": {
            name: fmean(seconds.get(part.phase, 0.0) for seconds in phases) for name, part in STEP_PARTS.items()
        },
        "measured_steps": steps_made,
        "backward_passes_per_step": fmean(figures["backward_passes_per_step"] for figures in by_worker),
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
