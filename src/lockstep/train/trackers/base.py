"""The base tracker, which keeps nothing, and a group of trackers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

# Levels of lines for people: printed with --verbose only, by default, and with --quiet too.
DETAIL, INFO, ALWAYS = 10, 20, 30

# The scalars of a record under the names that TensorBoard users of such scripts know.
_STEP_SCALARS = {
    "loss": "Loss/train",
    "top1": "Top1/train",
    "top5": "Top5/train",
    "images_per_second": "Throughput/train",
    "data_wait": "DataWait/train",
    "lr": "Lr",
}


class Tracker:
    """What the training loop tells about a run. The base class does nothing with it."""

    def say(self, line: str, level: int = INFO) -> None:
        """A line for people."""

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        """An epoch begins (0 is the first), of which `steps` steps are to be taken and `done` were before a resume."""

    def advance(self) -> None:
        """One step was taken; its figures may still be on the device."""

    def record(self, record: Record) -> None:
        """One record (see `lockstep.files.jsonl`)."""

    def unwritten(self) -> list[str]:
        """Write what was kept back because the disk was full; returns what cannot be written even now."""
        return []

    def rewind(self, step: int, in_epoch: bool) -> None:
        """The run goes back to after `step`; if that is `in_epoch`, to where its epoch had not been recorded yet."""

    def close(self) -> None:
        """The run is over, well or not."""


class TrackerGroup(Tracker):
    """Several trackers, told everything in turn."""

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
    """A record's figures under the names used in TensorBoard, MLflow and W&B."""
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
    """The metrics of `fit` in a record that are one number each."""
    return {name: value for name, value in record.get("metrics", {}).items() if isinstance(value, float)}
