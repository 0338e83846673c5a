"""Plan a study's measurements and batch sizes, write their records, and find those already recorded.

A study is of any program, or of `lockstep train`, which is one. Its workers measure their own steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.config.schema import TrainConfig
from lockstep.config.values import check_global_batch
from lockstep.errors import ConfigError, plural
from lockstep.files.jsonl import RecordWriter
from lockstep.train.optim.schedule import DEFAULT_BATCH, plan_batches

KEY = ("job", "workers", "nodes", "threads", "global_batch", "repeat", "steps", "warmup_steps")
Records = Iterable[Mapping[str, Any]]
Mode = Literal["strong", "weak"]
PRECISION = 16  # the largest batch that fits is found to within 1/16
MAX_LABEL = 60  # characters of the command, in legends


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


def check_record_file(path: Path) -> None:
    """Create the folder of a study's records and check that the file is writable, before measuring.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}; choose another file") from None


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a study's record, with the time."""
    writer = RecordWriter(path)
    writer.write({**record, "unix_time": time.time()})
    writer.close()


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


def measured_flags(config: TrainConfig, steps: int) -> list[str]:
    """Return the flags with which a training job takes so many steps, and leaves its weights as they are.

    Every step then computes the same, and none can diverge, with any batch.
    """
    epochs = max(config.epochs, steps + 2)  # the first step of an epoch does not count
    own = ["--lr", "1e-12", "--epochs", str(epochs), "--run-dir", "{run}", "--track", "--io-every", "0"]
    return [*own, "--checkpoint-epochs", "0", "--checkpoint-steps", "0"]


def batch_flags(config: TrainConfig, global_batch: int) -> list[str]:
    """Return the flags that give a training job this global batch, in addition to those that it has."""
    if config.global_batch_size is not None:
        return ["--global-batch-size", str(global_batch)]
    each = (config.batch_size or DEFAULT_BATCH) * config.accumulate
    return ["--batch-workers", str(max(1, round(global_batch / each)))]


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
    check_counts(counts)
    check_global_batch(command, "--global-batch", global_batch, counts)
    return shuffled([(workers, global_batch, (mode,)) for workers in sorted(counts)], repeats, seed)


def about_program(command: Sequence[str], mode: Mode | None = None, global_batch: int | None = None) -> dict[str, Any]:
    """Return the fields that identify a program in records: a digest, a label and the command."""
    whole = json.dumps([list(command), os.getcwd(), mode, global_batch])
    text = " ".join(command)
    label = text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"
    return {"job": hashlib.sha256(whole.encode()).hexdigest()[:8], "label": label, "flags": list(command)}
