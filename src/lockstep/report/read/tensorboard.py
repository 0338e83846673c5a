"""Read runs from TensorBoard event files, written by Lockstep or by other scripts.

Known tags, in upper or lower case: Top1/val, top5/train, Loss/train, Throughput/train, Time/train, Lr. Steps may be
optimizer steps or epochs; accuracies may be shares or percentages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.report.read.curve import Curve
from lockstep.report.read.run import Run, Split

EVENTS = "events.out.tfevents."
_FIGURES = {
    "loss": "loss",
    "top1": "top1",
    "acc1": "top1",
    "top5": "top5",
    "acc5": "top5",
    "throughput": "images_per_second",
    "time": "epoch_seconds",
    "datawait": "data_wait",
}
_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "train_epoch": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "val",
}
_RATES = ("lr", "learning_rate", "lr/train", "train/lr")
_HEADER = struct.Struct("<QI")  # an event's length and a checksum; another checksum follows the event
_CHECKSUM_BYTES = 4


class _Points(NamedTuple):
    steps: list[int]
    unix_times: list[float]
    values: list[float]


@dataclass(frozen=True)
class ClockRun(Run):
    """A run whose curves are over wall-clock time, including evaluations and pauses."""

    @property
    def train_seconds(self) -> float | None:
        """The sum of the recorded training times of the epochs; None if none was recorded."""
        taken = self.epochs.get(("epoch_seconds", "train"))
        known = [seconds for seconds in taken.values if math.isfinite(seconds)] if taken else []
        return sum(known) if known else None


def event_files(folder: Path) -> list[Path]:
    """Return the event files directly in a folder, oldest first."""
    return sorted(path for path in folder.iterdir() if EVENTS in path.name and path.is_file())


def read_tensorboard(path: Path, warn: Callable[[str], None]) -> Run | None:
    """Read a folder of event files, or one file.

    Args:
        path: The folder or the file.
        warn: Called with one line for each problem.

    Returns:
        The run, or None if there are no scalars with known tags.
    """
    for file in event_files(path) if path.is_dir() else [path]:
        _check_end(file, warn)
    tags = _scalars(path, warn)
    by_step, by_epoch, unknown = _sort(tags)
    folder = path if path.is_dir() else path.parent
    if not by_step and not by_epoch:
        warn(f"{path}: skipped, as its event files have no scalars such as Top1/val or Throughput/train")
        return None
    if unknown:
        warn(f"{path}: skipped scalars with unknown tags: {', '.join(sorted(unknown)[:5])}")
    ends, is_guess = _epoch_ends(tags, by_epoch)
    if is_guess:
        warn(f"{path}: epochs are estimated, one per evaluation or record, as there is no Time/train")
    return _build(folder, by_step, by_epoch, ends)


def _scalars(path: Path, warn: Callable[[str], None]) -> dict[str, _Points]:
    """Return all scalars by tag, sorted by step, without those that a resumed run overwrote."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        tags = {
            tag: [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
        for tag in events.Tags()["tensors"]:  # scalars of TensorFlow 2
            if any(dim.size != 1 for e in events.Tensors(tag) for dim in e.tensor_proto.tensor_shape.dim):
                continue  # not a scalar; make_ndarray would allocate memory for any shape that a file claims
            values = [(e.step, e.wall_time, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
            if values and all(value.size == 1 and value.dtype.kind in "fiu" for _, _, value in values):
                tags[tag] = [(step, time, float(value)) for step, time, value in values]
    except Exception as error:  # TensorBoard's parser can raise anything on a damaged file
        warn(f"cannot read TensorBoard events from {path}: {type(error).__name__}: {error}")
        return {}
    return {tag: _in_order(points) for tag, points in tags.items() if points}


def _in_order(points: Sequence[tuple[int, float, float]]) -> _Points:
    """Sort points by step. If a resumed run wrote a step again, keep the point that was written last."""
    newest = {step: (time, value) for step, time, value in sorted(points, key=lambda point: point[1])}
    steps = sorted(newest)
    return _Points(steps, [newest[step][0] for step in steps], [newest[step][1] for step in steps])


def _sort(tags: Mapping[str, _Points]) -> tuple[dict[str, _Points], dict[tuple[str, Split], _Points], list[str]]:
    """Return the points written every few steps, those written every epoch, and the unknown tags."""
    by_step: dict[str, _Points] = {}
    by_epoch: dict[tuple[str, Split], _Points] = {}
    unknown = []
    has_both = any(tag.lower().endswith("/train_epoch") for tag in tags)
    for tag, points in tags.items():
        lower = tag.lower().replace("top-", "top").replace("acc@", "acc")
        figure, split = _known(lower)
        if lower in _RATES:
            by_step["lr"] = points
        elif figure is None or split is None:
            unknown.append(tag)
        elif has_both and lower.endswith("/train") and figure != "epoch_seconds":
            by_step[figure] = points
        else:
            by_epoch[figure, split] = points
    return by_step, by_epoch, unknown


def _known(tag: str) -> tuple[str | None, Split | None]:
    """Return metric and split of a lower-case tag METRIC/SPLIT or SPLIT/METRIC; None for unknown parts."""
    first, _, second = tag.partition("/")
    if first in _SPLITS:
        first, second = second, first
    return _FIGURES.get(first), _SPLITS.get(second)


def _epoch_ends(
    tags: Mapping[str, _Points], by_epoch: Mapping[tuple[str, Split], _Points]
) -> tuple[Sequence[int], bool]:
    """Return the steps at which epochs ended, and whether they are estimated from evaluations or sparse records."""
    counted = [points.steps for tag, points in tags.items() if _is_of_training_epochs(tag.lower())]
    if counted:
        return min(counted, key=len), False
    ends = sorted({step for (_, split), points in by_epoch.items() if split == "val" for step in points.steps})
    if not ends and by_epoch:
        ends = min(by_epoch.values(), key=lambda points: len(points.steps)).steps
    return ends, not _are_epochs(ends)


def _is_of_training_epochs(tag: str) -> bool:
    """Whether a lower-case tag has one point per training epoch, such as time/train or loss/train_epoch."""
    return "train_epoch" in tag.split("/") or _known(tag) == ("epoch_seconds", "train")


def _are_epochs(ends: Sequence[int]) -> bool:
    """Whether `ends` are epoch numbers; otherwise they are optimizer steps."""
    return all(later - step == 1 for step, later in pairwise(ends)) and (len(ends) != 1 or ends[0] <= 1)


def _build(
    folder: Path,
    by_step: Mapping[str, _Points],
    by_epoch: Mapping[tuple[str, Split], _Points],
    ends: Sequence[int],
) -> ClockRun:
    start = _start(by_step, by_epoch)
    factor = 0.01 if _are_percentages(by_step, by_epoch) else 1.0

    def curve(figure: str, points: _Points) -> Curve:
        times = factor if figure in ("top1", "top5") else 1.0
        seconds = [time - start for time in points.unix_times]
        values = [value * times for value in points.values]
        return Curve(points.steps, _epochs_at(points.steps, ends), seconds, values)

    return ClockRun(
        path=folder,
        name=_name(folder),
        epochs={key: curve(key[0], points) for key, points in by_epoch.items()},
        steps={key: curve(key, points).thinned() for key, points in by_step.items()},
    )


def _start(by_step: Mapping[str, _Points], by_epoch: Mapping[tuple[str, Split], _Points]) -> float:
    """Return the start of training: the time of the first point, minus the first epoch's duration if known."""
    start = min(points.unix_times[0] for points in (*by_step.values(), *by_epoch.values()))
    first = by_epoch.get(("epoch_seconds", "train"))
    if first and 0 < first.values[0] < math.inf:
        start = min(start, first.unix_times[0] - first.values[0])
    return start


def _epochs_at(steps: Sequence[int], ends: Sequence[int]) -> list[float]:
    """Return the epochs done after each step; an epoch ended at each of `ends`, given as epoch numbers or steps."""
    if not ends:
        return [*map(float, steps)]
    if not _are_epochs(ends):
        return [*map(float, np.interp(steps, [0, *ends], range(len(ends) + 1)))]
    first = 1 if ends[0] == 0 else 0  # epochs are numbered from 0
    if steps[-1] > 1.5 * (ends[-1] + 1):  # `steps` are optimizer steps, `ends` are epochs
        return [step * (ends[-1] + first) / steps[-1] for step in steps]
    return [float(step + first) for step in steps]


def _are_percentages(by_step: Mapping[str, _Points], by_epoch: Mapping[tuple[str, Split], _Points]) -> bool:
    figures = [*by_step.items(), *((figure, points) for (figure, _), points in by_epoch.items())]
    return any(value > 1 for figure, points in figures if figure in ("top1", "top5") for value in points.values)


def _check_end(file: Path, warn: Callable[[str], None]) -> None:
    """Warn if a file ends within an event, such as after a crash; TensorBoard ignores that silently."""
    try:
        size, offset = file.stat().st_size, 0
        with file.open("rb") as events:
            while len(header := events.read(_HEADER.size)) == _HEADER.size:
                length, _ = _HEADER.unpack(header)
                end = offset + _HEADER.size + length + _CHECKSUM_BYTES
                if not length or end > size:  # zeros may follow if the machine crashed
                    break
                events.seek(end)
                offset = end
        if offset < size:
            warn(f"{file}: skipped the last {size - offset:,} bytes, an incomplete event")
    except OSError as error:
        warn(f"cannot read {file}: {error.strerror or error}")


def _name(folder: Path) -> str:
    """Return the folder's name, or its parent's if it is a run's TensorBoard folder."""
    path = folder.resolve()
    return path.parent.name if path.name in ("tensorboard", "tb", "logs", "events") else path.name
