"""The training epochs of a user's own loop, from its step records. It records only evaluations as epochs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.files.metric_records import AXES, EPOCH_FIGURES, Columns, MetricRecords

BY_STEPS, BY_SECONDS = ("loss", "top1", "top5"), ("images_per_second", "data_wait")  # what means are weighted by
TOLERANCE = 1e-9  # of a number of epochs that is a quotient


def epochs_of_steps(records: MetricRecords) -> Columns:
    """Return the complete epochs, each of which ends with a step record, with their mean figures and their times."""
    steps, epochs, seconds = (np.asarray(records.steps[axis], dtype=np.float64) for axis in AXES)
    found, numbers, per_epoch = Columns(EPOCH_FIGURES), np.ceil(epochs - TOLERANCE), records.steps_per_epoch
    if not len(steps):
        return found
    starts = np.flatnonzero(np.diff(numbers, prepend=np.nan) != 0)
    ends = np.append(starts[1:], len(steps)) - 1
    step_counts, durations = np.diff(steps, prepend=0.0), np.diff(seconds, prepend=0.0)
    columns = {"epoch_seconds": np.add.reduceat(durations, starts)}
    for names, weights in ((BY_STEPS, step_counts), (BY_SECONDS, durations)):
        columns |= {name: _means(records.steps[name], weights, starts) for name in names}
    for row, end in enumerate(ends):
        is_last = end == ends[-1] and not records.end
        if steps[end] == numbers[end] * per_epoch if per_epoch else not is_last:
            position = float(steps[end]), float(numbers[end]), float(seconds[end])
            found.add(position, {name: float(values[row]) for name, values in columns.items()})
    return found


def _means(column: Sequence[float], weights: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the weighted mean of each group of rows, without missing values; NaN if all are missing."""
    values = np.asarray(column, dtype=np.float64)
    known = np.where(np.isfinite(values), weights, 0.0)
    sums, totals = np.add.reduceat(known * np.nan_to_num(values), starts), np.add.reduceat(known, starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(totals > 0, sums / totals, np.nan)
