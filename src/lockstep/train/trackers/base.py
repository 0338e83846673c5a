"""The base tracker, which does nothing, a group of trackers, and metrics.jsonl, the authoritative record of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files.jsonl import format_record, keep_records
from lockstep.files.resilient_file import ResilientFile
from lockstep.train.run_folder import logger

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


class RecordTracker(Tracker):
    """Appends every record; while the disk is full, records wait in memory.

    A resumed run first removes the records that it will write again.

    Args:
        in_epoch: The run resumes within an epoch, so the record of the epoch's end is written again, too.
        warn: Called with a line to print when records cannot be written.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(
        self, path: Path, start_step: int, in_epoch: bool = False, warn: Callable[[str], None] = logger.warning
    ):
        self._path, self._warn = path, warn
        self._file = self._begin(start_step, in_epoch)

    def _begin(self, start_step: int, in_epoch: bool) -> ResilientFile:
        def keep(record: dict[str, Any]) -> bool:
            if record.get("kind") == "run":
                return True
            at_end = record.get("kind") == "epoch" and record.get("step") == start_step
            if at_end and not in_epoch:
                self._recorded.add((start_step, record.get("split")))
            return 0 < record.get("step", 0) <= start_step and not (at_end and in_epoch)

        self._recorded: set[tuple[int, Any]] = set()  # a complete run that is resumed repeats its last evaluation
        try:
            keep_records(self._path, keep)
            return ResilientFile(self._path, self._warn)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written: {error}; free disk space, or choose another --run-dir"
            ) from None

    def record(self, record: Record) -> None:
        if record["kind"] != "epoch" or (record["step"], record["split"]) not in self._recorded:
            self._file.write(format_record(record))

    def unwritten(self) -> list[str]:
        return [problem for problem in (self._file.flush(),) if problem]

    def rewind(self, step: int, in_epoch: bool) -> None:
        self._file.close()
        self._file = self._begin(step, in_epoch)

    def close(self) -> None:
        self._file.close()
