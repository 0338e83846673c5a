"""Exact metrics: sums and counts of each step, reduced once over the workers; never averages of averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.world import accelerator
from lockstep.world.world import World

FEW_LOGITS = 1 << 15  # passes up to this size are counted faster in groups
PASSES_AT_ONCE = 32


@dataclass(frozen=True)
class Totals:
    """Sums over samples; `top1` and `top5` count correct predictions. Totals of disjoint samples can be added."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.count + other.count)

    def figures(self) -> dict[str, Any]:
        """Return mean loss, top-1 and top-5 as fractions (0 to 1), and the number of samples."""
        samples = max(1.0, self.count)
        return {
            "loss": self.loss / samples,
            "top1": self.top1 / samples,
            "top5": self.top5 / samples,
            "samples": int(self.count),
        }


@dataclass(frozen=True)
class _Pass:
    """Results of a forward pass: losses [N], logits [N, K], labels [N], weights [N] (None: all 1)."""

    losses: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor | None

    @property
    def may_wait(self) -> bool:
        """Whether the pass is small enough to be counted together with others."""
        return self.weights is None and self.logits.numel() <= FEW_LOGITS


class Meter:
    """Accumulates this worker's steps on the device and reduces them over all workers on request.

    Nothing is copied to the host before then, so the host does not wait for a GPU. Small steps are counted several at
    a time, because their cost depends on the number of operations, not on their size.
    """

    def __init__(self, world: World):
        self._world = world
        self._last: _Pass | None = None  # of the current step, not yet in `_step`
        self._step: torch.Tensor | None = None
        self._waiting: list[_Pass] = []  # whole steps of equal shape, later than `_steps`
        self._steps: list[torch.Tensor] = []

    def add(
        self,
        losses: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Add one forward pass to the step: losses [N], logits [N, K], labels [N], weights [N] (None: all 1).

        The tensors are read later and must not be modified.
        """
        self._end_pass()
        self._last = _Pass(losses.detach(), logits.detach(), labels, weights)

    def _end_pass(self) -> None:
        if self._last is not None:
            row = _count([self._last])[0]
            self._step = row if self._step is None else self._step + row
            self._last = None

    def end_step(self) -> None:
        """Combine the passes since the last call into one step."""
        if self._step is None and self._last is not None and self._last.may_wait:
            if self._waiting and self._waiting[0].logits.shape != self._last.logits.shape:
                self._count_waiting()
            self._waiting.append(self._last)
            self._last = None
            if len(self._waiting) == PASSES_AT_ONCE:
                self._count_waiting()
            return
        self._end_pass()
        if self._step is not None:
            self._count_waiting()
            self._steps.append(self._step)
            self._step = None

    def _count_waiting(self) -> None:
        if self._waiting:
            self._steps.extend(_count(self._waiting))
            self._waiting.clear()

    def is_finite(self, back: int) -> bool:
        """Return whether this worker's loss was finite in the step `back` steps before the last one (0: the last)."""
        self._count_waiting()
        return bool(self._steps[-1 - back][0].isfinite())

    def forget(self) -> None:
        """Discard all steps and passes."""
        self._last = self._step = None
        self._waiting.clear()
        self._steps.clear()

    def reduce(self) -> list[Totals]:
        """Return the totals of each step since the last call, over all workers. Collective; equal on each worker.

        All workers must have ended the same number of steps.
        """
        self._count_waiting()
        if not self._steps:
            return []
        table = self._world.sum_(torch.stack(self._steps))
        self._steps.clear()
        return [Totals(*row) for row in table.tolist()]

    def reduce_passes(self) -> Totals:
        """Return the sum of all passes since the last call, over all workers. Collective; workers may add none."""
        self._end_pass()
        device = self._world.device
        row = torch.zeros(4, dtype=accelerator.sum_dtype(device), device=device) if self._step is None else self._step
        self._step = None
        return Totals(*self._world.sum_(row.to(device)).tolist())


def best_guesses(outputs: torch.Tensor) -> torch.Tensor:
    """Return the up to five most likely classes of each row of [N, K], most likely first; used by all accuracies."""
    return outputs.topk(min(5, outputs.shape[1]), dim=1).indices


def _count(passes: Sequence[_Pass]) -> torch.Tensor:
    """Return the sums of each pass, [passes, 4]: loss, top-1, top-5, samples. Several passes need equal shapes."""
    first = passes[0]
    logits = first.logits if len(passes) == 1 else torch.cat([taken.logits for taken in passes])
    labels = torch.cat([taken.labels for taken in passes]).unsqueeze(1)
    hits = (best_guesses(logits) == labels).view(len(passes), len(first.labels), -1)
    dtype = accelerator.sum_dtype(logits.device)
    losses = torch.stack([taken.losses for taken in passes])
    rows = torch.stack([each.to(dtype) for each in (losses, hits[:, :, 0], hits.any(2))], dim=1)
    if first.weights is None:
        sums, count = rows.sum(2), rows.new_full((len(passes), 1), len(first.labels))
    else:
        weights = first.weights.to(dtype)
        sums, count = rows @ weights, weights.sum().view(1, 1)
    return torch.cat([sums, count], dim=1)
