"""Exact metrics: sums and counts of each step, reduced over the workers once, never averages of averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lockstep.world import World


@dataclass(frozen=True)
class Totals:
    """Sums over samples; `top1` and `top5` count the right answers. Totals of disjoint samples may be added."""

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5, self.count + other.count)

    def figures(self) -> dict[str, Any]:
        """Mean loss, top-1 and top-5 as shares (0 to 1), and the number of samples."""
        samples = max(1.0, self.count)
        return {
            "loss": self.loss / samples,
            "top1": self.top1 / samples,
            "top5": self.top5 / samples,
            "samples": int(self.count),
        }


class Meter:
    """Collects this worker's steps on the device and reduces them over all workers when asked.

    Nothing is copied to the host before then, so a GPU is never waited for in between.
    """

    def __init__(self, world: World):
        self._world = world
        self._step: torch.Tensor | None = None
        self._steps: list[torch.Tensor] = []

    def add(
        self,
        losses: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Add one forward pass to the step: losses [N], logits [N, K], labels [N], weights [N] (None: all 1)."""
        hits = logits.detach().topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
        rows = torch.stack([losses.detach().double(), hits[:, 0].double(), hits.any(1).double()])
        if weights is None:
            sums, count = rows.sum(1), rows.new_full((1,), len(labels))
        else:
            sums, count = rows @ weights.double(), weights.double().sum().unsqueeze(0)
        row = torch.cat([sums, count])
        self._step = row if self._step is None else self._step + row

    def end_step(self) -> None:
        """The passes since the last call were one step."""
        if self._step is not None:
            self._steps.append(self._step)
            self._step = None

    def is_finite(self, back: int) -> bool:
        """Whether this worker's own loss was finite in the last step (0), or so many steps before."""
        return bool(self._steps[-1 - back][0].isfinite())

    def forget(self) -> None:
        """Empty the meter."""
        self._step = None
        self._steps.clear()

    def reduce(self) -> list[Totals]:
        """The totals of each step since the last call, over all workers, the same on each; empties the meter.

        All workers must have ended the same number of steps.
        """
        if not self._steps:
            return []
        table = self._world.sum_(torch.stack(self._steps))
        self._steps.clear()
        return [Totals(*row) for row in table.tolist()]

    def reduce_passes(self) -> Totals:
        """The sum of all passes since the last call; workers may have added different numbers of them, even none."""
        row = torch.zeros(4, dtype=torch.float64) if self._step is None else self._step
        self._step = None
        return Totals(*self._world.sum_(row.to(self._world.device)).tolist())
