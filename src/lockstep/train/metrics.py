"""Exact metrics: sums and counts of each step, reduced once over the workers; never averages of averages.

Also the loss of each sample, whether built in or custom, and `evaluate`, which counts each sample exactly once for any
number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.readers import lost_loaders_named
from lockstep.data.sets import Batch
from lockstep.diagnosis import publisher
from lockstep.errors import ConfigError
from lockstep.models.nested import cast, leaves
from lockstep.train.precision import Precision
from lockstep.world import accelerator
from lockstep.world.world import World


@dataclass(frozen=True)
class Totals:
    """Sums over samples; `top1` and `top5` count correct predictions. Totals of disjoint samples can be added."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.count + other.count)

    def figures(self, has_classes: bool = True) -> dict[str, Any]:
        """Return mean loss, with classes also top-1 and top-5 as fractions (0 to 1), and the number of samples."""
        samples = max(1.0, self.count)
        shares = {"top1": self.top1 / samples, "top5": self.top5 / samples} if has_classes else {}
        return {"loss": self.loss / samples, **shares, "samples": int(self.count)}


class Meter:
    """Accumulates this worker's steps on the device and reduces them over all workers on request.

    Nothing is copied to the host before then, so the host does not wait for a GPU. On a CPU, passes are summed together
    when they are reduced: between a network's passes, an operation on a few numbers takes 14 µs, and then 2.
    """

    max_held = 64  # passes

    def __init__(self, world: World, has_classes: bool = True):
        self._world, self._has_classes, self._dtype = world, has_classes, accelerator.sum_dtype(world.device)
        self._held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None] = []  # None: a step's end
        self._step: torch.Tensor | None = None  # the sum of the passes since `end_step`
        self._steps: list[torch.Tensor] = []

    def add(self, losses: torch.Tensor, logits: Any, labels: Any, weights: torch.Tensor | None = None) -> None:
        """Add one forward pass to the step: losses [N], logits [N, K], labels [N], weights [N] (None: all 1).

        Without classes, logits and labels are ignored.
        """
        losses = losses.detach().to(self._dtype, copy=True)
        if self._has_classes:
            hits = best_guesses(logits.detach()) == labels.unsqueeze(1)
        else:
            hits = torch.zeros_like(losses, dtype=torch.bool).unsqueeze(1)
        self._held.append((losses, hits, weights))
        if losses.device.type != "cpu" or len(self._held) >= self.max_held:
            self._settle()

    def end_step(self) -> None:
        """Combine the passes since the last call into one step."""
        self._held.append(None)

    def _settle(self) -> None:
        for held in self._held:
            if held is not None:
                losses, hits, weights = held
                rows = torch.stack([losses, hits[:, 0], hits.any(1), torch.ones_like(losses)])
                row = rows.sum(1) if weights is None else rows @ weights.to(self._dtype)
                self._step = row if self._step is None else self._step + row
            elif self._step is not None:
                self._steps.append(self._step)
                self._step = None
        self._held.clear()

    def is_finite(self, back: int) -> bool:
        """Return whether this worker's loss was finite in the step `back` steps before the last one (0: the last)."""
        self._settle()
        return bool(self._steps[-1 - back][0].isfinite())

    def reduce(self) -> list[Totals]:
        """Return the totals of each step since the last call, over all workers. Collective; equal on each worker.

        All workers must have ended the same number of steps.
        """
        self._settle()
        if not self._steps:
            return []
        table = self._world.sum_(torch.stack(self._steps))
        self._steps.clear()
        return [Totals(*row) for row in table.tolist()]

    def reduce_passes(self) -> Totals:
        """Return the sum of all passes since the last call, over all workers. Collective; workers may add none."""
        self._settle()
        device = self._world.device
        row = torch.zeros(4, dtype=self._dtype, device=device) if self._step is None else self._step
        self._step = None
        return Totals(*self._world.sum_(row.to(device)).tolist())


def best_guesses(outputs: torch.Tensor) -> torch.Tensor:
    """Return the up to five most likely classes of each row of [N, K], most likely first; used by all accuracies."""
    return outputs.topk(min(5, outputs.shape[1]), dim=1).indices


Metric = Callable[[Any, Any], tuple[Any, Any]]
"""Maps outputs and targets (with classes: [N, K] and [N]) to (sum, count), numbers or tensors of equal shape."""
Value = float | npt.NDArray[np.float64]
MAX_CLASSES = 2_000  # a confusion matrix of this size takes 32 MB
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
    """Custom metrics and, unless `classes` is 0, the confusion matrix."""

    def __init__(self, metrics: Mapping[str, Metric], classes: int, world: World):
        for name, metric in metrics.items():
            if not (isinstance(name, str) and name.isidentifier()) or name in TAKEN:
                raise ConfigError(
                    f"metrics= {name!r}: the name must be a Python identifier other than {', '.join(TAKEN)}"
                )
            if not callable(metric):
                raise ConfigError(f"metrics={{{name!r}: {metric!r}}}: {_METRIC_FORM}")
        self._metrics, self._world = metrics, world
        self._classes = classes if classes <= MAX_CLASSES else 0
        self._sums: dict[str, torch.Tensor] = {}
        self._answers: list[torch.Tensor] = []

    def add(self, outputs: Any, targets: Any) -> None:
        """Add a batch: outputs [N, K], targets [N]; without classes, others."""
        for name, metric in self._metrics.items():
            row = _pair(name, metric(outputs, targets), self._world.device)
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
        """Return the metrics since the last call, over all workers. Collective."""
        shapes: dict[str, list[int]] = {}
        own_shapes = {name: list(row.shape) for name, row in self._sums.items()}
        for own in self._world.gather(own_shapes) if self._metrics else ():
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
        raise ConfigError(f"metrics={{{name!r}: ...}} returned {returned!r:.100}; it {_METRIC_FORM}") from None


_METRIC_FORM = "must be a function of (outputs, targets) that returns (sum, count) as numbers or tensors of equal shape"


Criterion = Callable[[Any, Any], torch.Tensor]
cross_entropy: Criterion = partial(F.cross_entropy, reduction="none")


def losses_of(criterion: Criterion, logits: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of each sample, [N]; for a mixed image, the losses of both labels weighted by their shares."""
    losses = criterion(logits, batch.labels)
    if batch.others is None or batch.shares is None:
        return losses
    return torch.lerp(criterion(logits, batch.others), losses, batch.shares.to(losses.dtype))


Loss = Callable[[Any, Any], torch.Tensor]
"""Maps outputs and targets (with classes: [N, K] and [N]) to the loss of each sample, [N], or their mean."""


class CustomLoss:
    """Adapts a loss to the training loop, which needs one value per sample.

    A mean is expanded to all of its samples, so that shares of different sizes are weighted correctly.

    Args:
        per_sample: Reject means, because mixup or cutmix weight the loss of each sample.
    """

    def __init__(self, loss: Loss, device: torch.device, per_sample: bool = False):
        if not callable(loss):
            raise ConfigError(f"loss={loss!r}: must be a function of (outputs, targets), such as torch.nn.MSELoss()")
        if isinstance(loss, nn.Module):
            if any(parameter.requires_grad for parameter in loss.parameters()):
                raise ConfigError(
                    f"loss={type(loss).__name__} has parameters, which fit() does not train; move them into the model"
                )
            loss = loss.to(device)
        self._loss, self._per_sample = loss, per_sample

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of each sample, [N]."""
        losses: Any = self._loss(outputs, targets)
        samples = len(next(leaves(targets)))
        if not isinstance(losses, torch.Tensor):
            raise ConfigError(f"loss= returned a {type(losses).__name__}, not a tensor; {_LOSS_FORM}")
        if losses.shape not in ((), (samples,)):
            raise ConfigError(
                f"loss= returned a tensor of shape {list(losses.shape)} for {samples} samples; {_LOSS_FORM}"
            )
        learns = any(getattr(leaf, "requires_grad", False) for leaf in leaves(outputs))
        if torch.is_grad_enabled() and learns and not losses.requires_grad:
            raise ConfigError(
                "loss= returned a tensor without a gradient; compute it from outputs with torch functions"
            )
        if losses.ndim:
            return losses
        if self._per_sample:
            raise ConfigError(
                'loss= returned the mean, but mixup and cutmix need one loss per sample (reduction="none")'
            )
        return losses.expand(samples)


_LOSS_FORM = 'return one loss per sample (reduction="none", then .flatten(1).mean(1)), or their mean'


@lost_loaders_named()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: Precision,
    meter: Meter,
    criterion: Criterion = cross_entropy,
    measures: Measures | None = None,
) -> Totals:
    """Return the totals of a model over the batches of all workers, equal on each worker."""
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            publisher.report("evaluation")
            with precision.autocast():
                outputs = model(batch.images)
            outputs = cast(outputs, precision.loss_dtype)
            meter.add(criterion(outputs, batch.labels), outputs, batch.labels, batch.weights)
            if measures is not None:
                measures.add(outputs, batch.labels)
    return meter.reduce_passes()
