"""The base tracker, which does nothing, and a group of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

# Levels of printed lines: only with --verbose, by default, and also with --quiet.
DETAIL, INFO, ALWAYS = 10, 20, 30

# Fields of step records and their usual names in TensorBoard.
_STEP_SCALARS = {
    "loss": "Loss/train",
    "top1": "Top1/train",
    "top5": "Top5/train",
    "images_per_second": "Throughput/train",
    "data_wait": "DataWait/train",
    "lr": "Lr",
}


class Tracker:
    """Receives records and lines from the training loop. The base class ignores them."""

    def say(self, line: str, level: int = INFO) -> None:
        """Print a line."""

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        """Start an epoch (0 is the first) of `steps` steps, of which `done` were taken before a resume."""

    def advance(self) -> None:
        """Note that a step was taken; its results may still be on the device."""

    def record(self, record: Record) -> None:
        """Store a record (see `lockstep.files.jsonl`)."""

    def unwritten(self) -> list[str]:
        """Write records that were kept in memory because the disk was full. Return the remaining problems."""
        return []

    def rewind(self, step: int, in_epoch: bool) -> None:
        """Remove records after `step`; if `in_epoch`, also the record of the epoch that ends with this step."""

    def close(self) -> None:
        """End the run, successful or not."""


class TrackerGroup(Tracker):
    """Forwards everything to several trackers in order."""

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = trackers

    def say(self, line: str, level: int = INFO) -> None:
        for tracker in self._trackers:
            tracker.say(line, level)

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        for tracker in self._trackers:
            tracker.begin_epoch(epoch, epochs, steps, done)

    def advance(self) -> None:
        for tracker in self._trackers:
            tracker.advance()

    def record(self, record: Record) -> None:
        for tracker in self._trackers:
            tracker.record(record)

    def unwritten(self) -> list[str]:
        return [problem for tracker in self._trackers for problem in tracker.unwritten()]

    def rewind(self, step: int, in_epoch: bool) -> None:
        for tracker in self._trackers:
            tracker.rewind(step, in_epoch)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def scalars(record: Record) -> dict[str, float]:
    """Return a record's values under the names used in TensorBoard, MLflow and W&B."""
    if record["kind"] == "step":
        return {tag: record[key] for key, tag in _STEP_SCALARS.items()}
    if record["kind"] != "epoch":
        return {}
    split = record["split"]
    suffix = "train_epoch" if split == "train" else split
    figures = {f"{name}/{suffix}": record[name.lower()] for name in ("Loss", "Top1", "Top5")}
    return figures | {
        f"Time/{split}": record["epoch_seconds"],
        f"Throughput/{suffix}": record["images_per_second"],
        **{f"{name}/{suffix}": value for name, value in single_metrics(record).items()},
    }


def single_metrics(record: Record) -> dict[str, float]:
    """Return the scalar metrics of `fit` in a record."""
    return {name: value for name, value in record.get("metrics", {}).items() if isinstance(value, float)}
