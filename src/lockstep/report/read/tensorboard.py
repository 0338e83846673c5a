"""Read runs from TensorBoard event files, written by Lockstep or by other scripts.

A tag is split into words. A word for the phase and words for the metric, in any order and case, make it known:
Top1/val, val_acc, train_loss_epoch, Accuracy/Validation. Steps may be optimizer steps or epochs; accuracies may be
shares or percentages.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.report.read.run import Curve, Run, Split

EVENTS = "events.out.tfevents."
_PHASES: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluation", "test", "testing"), "val"),
}
_EVERY = ("epoch", "step", "batch")
_METRICS = {  # patterns of all other words of a tag
    "loss": r"(cross ?entropy ?)?loss",
    "top1": r"top ?1( ?acc(uracy)?)?|((sparse )?categorical )?acc(uracy)?( ?top)?( ?1)?",
    "top5": r"top ?5( ?acc(uracy)?)?|acc(uracy)?( ?top)? ?5",
    "images_per_second": r"throughput|(images|samples) per sec(ond)?",
    "epoch_seconds": r"time",
    "data_wait": r"data ?wait",
    "lr": r"(lr|learning ?rate)( .*)?",  # optimizers and parameter groups may follow
}
_OF_TRAINING = ("loss", "images_per_second")  # if the tag has no phase
_KNOWN = (
    "known are lr, and loss, accuracy, top1, top5, throughput, time and datawait of train or val, such as val/accuracy"
)
MAX_NAMED = 8  # tags per warning
_HEADER = struct.Struct("<QI")  # an event's length and a checksum; another checksum follows the event
_CHECKSUM_BYTES = 4


class _Tag(NamedTuple):
    """What a tag says; None for what is unknown or missing.

    Args:
        every: "epoch", "step" or "batch".
    """

    metric: str | None
    split: Split | None
    every: str | None


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


def event_folders(folder: Path) -> list[Path]:
    """Return the folders with the event files of one run.

    They are the folder itself and those in it that are named for a phase, as written by Keras (validation) and by
    `SummaryWriter.add_scalars` (Loss_val).
    """
    own = [folder] if event_files(folder) else []
    names = sorted(
        path for path in folder.iterdir() if path.name.lower() in _PHASES or (own and _parse(path.name).split)
    )
    readable = [path for path in names if path.is_dir() and os.access(path, os.R_OK | os.X_OK)]
    return [*own, *(path for path in readable if event_files(path))]


def read_tensorboard(path: Path, warn: Callable[[str], None]) -> Run | None:
    """Read the `event_folders` of a folder, or one event file.

    Args:
        path: The folder or the file.
        warn: Called with one line for each problem.

    Returns:
        The run, or None if there are no scalars with known tags.
    """
    folder = path if path.is_dir() else path.parent
    found: dict[str, _Points] = {}
    tags: dict[str, _Tag] = {}
    for source in event_folders(path) if path.is_dir() else [path]:
        for file in event_files(source) if source.is_dir() else [source]:
            _check_end(file, warn)
        phase = _PHASES.get(folder.name.lower()) if source == path else _parse(source.name).split
        for tag, points in _scalars(source, warn).items():
            name = tag if source == path else f"{source.name}/{tag}"
            found[name], tags[name] = points, _parse(tag, phase)
    by_step, by_epoch, unknown = _sort(found, tags)
    if not by_step and not by_epoch:
        warn(f"{path}: skipped, as its event files have no known scalars; found {_listed(unknown)}; {_KNOWN}")
        return None
    if unknown:
        warn(f"{path}: skipped scalars {_listed(unknown)}; {_KNOWN}")
    ends, is_guess = _epoch_ends(found, tags, by_epoch)
    if is_guess:
        warn(f"{path}: epochs are estimated, one per evaluation or record, as there is no Time/train")
    return _build(folder, by_step, by_epoch, ends)


def _listed(tags: Sequence[str]) -> str:
    return ", ".join(sorted(tags)[:MAX_NAMED]) + (", ..." if len(tags) > MAX_NAMED else "") or "none"


def _parse(tag: str, phase: Split | None = None) -> _Tag:
    """Read the words of a tag; `phase` is that of its folder."""
    words = [word.lower() for word in re.split(r"[\W_]+|(?<=[a-z])(?=[A-Z])", tag) if word]
    splits = {_PHASES[word] for word in words if word in _PHASES}
    every = next((word for word in words if word in _EVERY), None)
    rest = " ".join(word for word in words if word not in _PHASES and word not in _EVERY)
    metric = next((metric for metric, pattern in _METRICS.items() if re.fullmatch(pattern, rest)), None)
    if metric == "epoch_seconds" and every in ("step", "batch"):
        metric = None
    split: Split | None = "val" if "val" in splits else "train" if splits else phase
    split = split or ("train" if metric in _OF_TRAINING else None)
    return _Tag(metric, split, every)


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


def _sort(
    found: Mapping[str, _Points], tags: Mapping[str, _Tag]
) -> tuple[dict[str, _Points], dict[tuple[str, Split], _Points], list[str]]:
    """Return the points written every few steps, those written every epoch, and the tags of neither.

    Of several tags with the same meaning, such as parameter groups, the one with the most points counts.
    """
    by_step: dict[str, _Points] = {}
    by_epoch: dict[tuple[str, Split], _Points] = {}
    others = []
    has_both = any(tag.metric and tag.split == "train" and tag.every == "epoch" for tag in tags.values())
    for name in sorted(found, key=lambda name: len(found[name].steps), reverse=True):
        metric, split, every = tags[name]
        is_step = split == "train" and (every in ("step", "batch") or (has_both and every is None))
        if metric and (metric == "lr" or (is_step and metric != "epoch_seconds")) and metric not in by_step:
            by_step[metric] = found[name]
        elif metric and split and metric != "lr" and not is_step and (metric, split) not in by_epoch:
            by_epoch[metric, split] = found[name]
        else:
            others.append(name)
    return by_step, by_epoch, others


def _epoch_ends(
    found: Mapping[str, _Points], tags: Mapping[str, _Tag], by_epoch: Mapping[tuple[str, Split], _Points]
) -> tuple[Sequence[int], bool]:
    """Return the steps at which epochs ended, and whether they are estimated from evaluations or sparse records."""
    counted = [
        found[name].steps
        for name, tag in tags.items()
        if tag.metric and tag.split == "train" and (tag.every == "epoch" or tag.metric == "epoch_seconds")
    ]
    if counted:
        return min(counted, key=len), False
    ends = sorted({step for (_, split), points in by_epoch.items() if split == "val" for step in points.steps})
    if not ends and by_epoch:
        ends = min(by_epoch.values(), key=lambda points: len(points.steps)).steps
    return ends, not _are_epochs(ends)


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
