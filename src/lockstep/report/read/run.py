"""One run as a report sees it, whatever it was read from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from lockstep.files.fields import number, text, whole
from lockstep.report.read.curve import Curve
from lockstep.scaling_model import machine_of

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Run:
    """What was recorded of one run. Shares (top1, top5, data_wait) run from 0 to 1.

    Args:
        path: Its folder.
        name: In legends; distinct among the runs of a report.
        start: The newest session's `run` record, empty if there is none.
        workers: Of each session in order.
        epochs: For each figure and split, one point an epoch or evaluation.
        steps: For each figure, one point a step record, thinned.
        planned_epochs: That the run shall have.
        stopped: Whether it ended on request before its end.
    """

    path: Path
    name: str
    start: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[int] = ()
    epochs: Mapping[tuple[str, Split], Curve] = field(default_factory=dict)
    steps: Mapping[str, Curve] = field(default_factory=dict)
    planned_epochs: int | None = None
    stopped: bool = False
    reached_goal: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steady_workers(self) -> int | None:
        """The number of workers, if all sessions had the same."""
        return self.workers[0] if self.workers and len(set(self.workers)) == 1 else None

    @property
    def data(self) -> str | None:
        return text(self.start, "data") or text(self.config, "data", "dataset")

    @property
    def arch(self) -> str | None:
        return text(self.start, "arch") or text(self.config, "model", "arch")

    @property
    def global_batch(self) -> int | None:
        return whole(self.start, "global_batch") or whole(self.config, "global_batch_size")

    @property
    def precision(self) -> str | None:
        return text(self.config, "numerics", "precision")

    @property
    def label_changes(self) -> str:
        """What its training loss is measured against instead of the labels, such as "label smoothing 0.1"; or ""."""
        fields = (("optim", "label_smoothing"), ("augment", "mixup"), ("augment", "cutmix"))
        changes = [
            f"{key.replace('_', ' ')} {value:g}" for part, key in fields if (value := number(self.config, part, key))
        ]
        return " and ".join(changes)

    @property
    def seed(self) -> int | None:
        return whole(self.config, "seed")

    @property
    def machine(self) -> str:
        """The model of its GPUs or processor; "" if that is unknown."""
        return machine_of({"device": text(self.config, "device"), "environment": self.environment})

    @property
    def done_epochs(self) -> int | None:
        """Epochs that were completed."""
        ends = [curve.epochs[-1] for curve in self.epochs.values() if curve]
        return max((int(end) for end in ends if math.isfinite(end)), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether it has all its epochs, or what it was to reach."""
        return self.reached_goal or (self.planned_epochs is not None and self.done_epochs == self.planned_epochs)

    @property
    def train_seconds(self) -> float | None:
        """Of training, over all sessions."""
        curves = [*self.epochs.values(), *self.steps.values()]
        return max((curve.seconds[-1] for curve in curves if curve), default=None)

    @property
    def images_per_second(self) -> float | None:
        """The median of its epochs in training, or of its step records before the first epoch has ended.

        Of a run that was resumed on another number of workers, it is that of the last session alone.
        """
        curves = (self.epochs.get(("images_per_second", "train")), self.steps.get("images_per_second"))
        rates = next((rates for curve in curves if curve and (rates := self._steady_values(curve))), [])
        return median(rates) if rates else None

    def _steady_values(self, curve: Curve) -> list[float]:
        """The numbers of a curve that were measured on the number of workers that the last session had."""
        resumed = number(self.start, "step") or 0
        first = -math.inf if len(set(self.workers)) < 2 else resumed
        placed = zip(curve.steps, curve.values, strict=True)
        return [value for step, value in placed if step > first and math.isfinite(value)]

    def curve(self, figure: str, split: Split) -> Curve | None:
        """A figure over the epochs, or over the steps while training has fewer than two epochs."""
        by_epoch = self.epochs.get((figure, split))
        if split == "train" and (by_epoch is None or len(by_epoch) < 2):
            return self.steps.get(figure) or by_epoch
        return by_epoch

    def curve_of_steps(self, figure: str) -> Curve | None:
        """A figure of training over the steps, or over the epochs where steps have none."""
        return self.steps.get(figure) or self.epochs.get((figure, "train"))

    def settings(self) -> Mapping[str, Any]:
        """What the run was configured with, but for its seed and where it was kept; empty if that is unknown."""
        return {key: value for key, value in self.config.items() if key not in ("seed", "run")}

    def option(self, part: str, key: str) -> str | None:
        """A word of its configuration, or None."""
        return text(self.config, part, key)
