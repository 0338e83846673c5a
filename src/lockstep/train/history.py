"""The results of a run's epochs as arrays, over all sessions of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.files.jsonl import Record, count, mapping, number, plausible, read_records
from lockstep.files.metric_records import MetricRecords, Position, Split
from lockstep.run.records.run_folder import RunFolder
from lockstep.world.world import World

Figures = Mapping[str, npt.NDArray[np.float64]]
_FIELDS = {
    **{name: name for name in ("epoch", "step", "loss", "top1", "top5", "samples", "images_per_second")},
    "epoch_seconds": "seconds",
}
"""Fields of records, and their names in `History`."""


@dataclass(frozen=True)
class History:
    """Values per epoch, float64 [epochs]: epoch (from 1), step, loss, samples, seconds, with classes top1 and top5.

    Args:
        train: Values of training.
        val: Values of evaluations, including the metrics of `fit`. A metric with several values is [epochs, ...].
    """

    train: Figures
    val: Figures


class EpochRecords(MetricRecords):
    """The records of all epochs so far, equal on all workers except for times, which each measures itself."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: list[Record] = []  # without those that later ones have replaced

    def take_epoch(self, split: Split, position: Position, record: Record) -> None:
        """Take a record, which replaces those of the same and later epochs, which were interrupted or are repeated."""
        if (epoch := number(record, "epoch")) is not None:
            kept = [old for old in self.newest if old["split"] != split or old["epoch"] < epoch]
            self.newest = [*kept, {**record, "split": split}]

    def history(self) -> History:
        return History(*(_arrays([r for r in self.newest if r["split"] == split]) for split in ("train", "val")))


def read_epochs(folder: RunFolder, step: int, world: World) -> list[Record]:
    """Return the records of a run's epochs up to a step, which rank 0 reads from its folder. Collective."""
    records = EpochRecords()
    if world.is_main and step:
        with suppress(OSError):  # a new folder has none
            records.take_all(each for each in read_records(folder.metrics) if (count(each, "step") or 0) <= step)
    return list(world.from_main(records.newest))


def _arrays(records: Sequence[Record]) -> Figures:
    known = [name for name in _FIELDS if not records or any(name in record for record in records)]
    figures = {_FIELDS[name]: _array([plausible(record.get(name)) for record in records]) for name in known}
    metrics = {name: None for record in records for name in mapping(record, "metrics")}  # in order
    return figures | {name: _array([mapping(r, "metrics").get(name) for r in records]) for name in metrics}


def _array(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return a row per value; NaN for values that are missing, None or, in a damaged file, not numbers."""
    arrays = [_numbers(value) for value in values]
    shape = max((array.shape for array in arrays), key=len, default=())
    rows = [array if array.shape == shape else np.full(shape, np.nan) for array in arrays]
    return np.stack(rows) if rows else np.zeros(0)


def _numbers(value: Any) -> npt.NDArray[np.float64]:
    with suppress(TypeError, ValueError, OverflowError):
        return np.array(np.nan if value is None else value, dtype=np.float64)
    return np.array(np.nan)
