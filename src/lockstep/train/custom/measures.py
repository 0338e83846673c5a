"""Metrics of evaluations besides loss and top-1: sums and counts, reduced once, so exact for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import ConfigError
from lockstep.train.metrics import best_guesses
from lockstep.world import accelerator
from lockstep.world.world import World

Metric = Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]
"""Maps outputs [N, K] and targets [N] of a batch to (sum, count), numbers or tensors of equal shape."""
Value = float | npt.NDArray[np.float64]
MOST_CLASSES = 2_000  # a confusion matrix of this size takes 32 MB
TAKEN = ("epoch", "step", "loss", "top1", "top5", "samples", "seconds", "images_per_second")
"""Reserved names."""


@dataclass(frozen=True)
class Measured:
    """The metrics of an evaluation, equal on every worker.

    Args:
        metrics: Sum divided by count, by name; NaN where the count is 0.
        confusion: Samples by true class (row) and predicted class (column), int64 [K, K].
    """

    metrics: Mapping[str, Value] = field(default_factory=dict)
    confusion: npt.NDArray[np.int64] | None = None


class Measures:
    """Measures nothing."""

    def add(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: outputs [N, K], targets [N]."""

    def reduce(self) -> Measured:
        """Return the metrics since the last call, over all workers. Collective."""
        return Measured()


class CustomMeasures(Measures):
    """Custom metrics and the confusion matrix.

    Args:
        classes: The number of classes; 0: no confusion matrix.
    """

    def __init__(self, metrics: Mapping[str, Metric], classes: int, world: World):
        """Raise ConfigError for invalid names or metrics."""
        for name, metric in metrics.items():
            if not (isinstance(name, str) and name.isidentifier()) or name in TAKEN:
                raise ConfigError(
                    f"metrics= {name!r}: the name must be a Python identifier other than {', '.join(TAKEN)}"
                )
            if not callable(metric):
                raise ConfigError(f"metrics={{{name!r}: {metric!r}}}: {_WANTED}")
        self._metrics, self._world = metrics, world
        self._classes = classes if classes <= MOST_CLASSES else 0
        self._sums: dict[str, torch.Tensor] = {}
        self._answers: list[torch.Tensor] = []

    def add(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        for name, metric in self._metrics.items():
            row = _pair(name, metric(outputs, targets), outputs.device)
            before = self._sums.get(name)
            if before is not None and before.shape != row.shape:
                raise ConfigError(
                    f"metrics={{{name!r}: ...}} returned a sum of shape {list(row.shape[1:])} after one of shape "
                    f"{list(before.shape[1:])}; the shape must be the same for every batch"
                )
            self._sums[name] = row if before is None else before + row
        if self._classes:
            self._classes = max(self._classes, outputs.shape[1])  # a model may have more classes than the data
            self._answers.append(torch.stack([targets, best_guesses(outputs)[:, 0]]))

    def reduce(self) -> Measured:
        shapes: dict[str, list[int]] = {}
        for own in self._world.gather({name: list(row.shape) for name, row in self._sums.items()}):
            for name, shape in own.items():  # a worker may have no batch
                if shapes.setdefault(name, shape) != shape:
                    raise ConfigError(f"metrics={{{name!r}: ...}} returned sums of different shapes on the workers")
        metrics = {}
        for name, shape in shapes.items():
            device = self._world.device
            empty = torch.zeros(shape, dtype=accelerator.sum_dtype(device), device=device)
            total, count = self._world.sum_(self._sums.get(name, empty)).cpu().numpy()
            with np.errstate(divide="ignore", invalid="ignore"):
                value = np.where(count != 0, total / count, np.nan)
            metrics[name] = float(value) if value.ndim == 0 else value
        self._sums = {}
        return Measured(metrics, self._confusion())

    def _confusion(self) -> npt.NDArray[np.int64] | None:
        if not self._classes:
            return None
        side = self._classes = max(self._world.gather(self._classes))
        counts = torch.zeros(side * side, dtype=torch.int64, device=self._world.device)
        if self._answers:
            targets, predicted = torch.cat(self._answers, 1)
            counts += torch.bincount(targets * side + predicted, minlength=side * side)
        self._answers = []
        return self._world.sum_(counts).cpu().numpy().reshape(side, side)


def _pair(name: str, returned: Any, device: torch.device) -> torch.Tensor:
    """Convert (sum, count) to one tensor [2, ...] of the device's dtype for sums."""
    dtype = accelerator.sum_dtype(device)
    try:
        total, count = (torch.as_tensor(each, dtype=dtype, device=device) for each in returned)
        return torch.stack(torch.broadcast_tensors(total, count))
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"metrics={{{name!r}: ...}} returned {returned!r:.100}; it {_WANTED}")


_WANTED = "must be a function of (outputs, targets) that returns (sum, count) as numbers or tensors of equal shape"
