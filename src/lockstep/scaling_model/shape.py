"""What a series shows that the model has no term for: super-linear points, knees, workers that share cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lockstep.scaling_model.series import MeasuredPoint

# Throughput grows with workers^gain between two counts. From one doubling to the next the gains of this model's curves
# fall by less than 0.4, so a fall by 0.5 to less than half of ideal is a break; at the step to a second node, 0.3 is.
KNEE_FALL, NODE_FALL, FLAT = 0.5, 0.3, 0.5
STEEP = 1.1  # a gain above it is no noise
MARGIN = 0.02  # of a measured efficiency, beside its own spread, before it counts as above 1


class Knee(NamedTuple):
    """The last count before growth breaks off, the next one measured, and what grows there beside the workers."""

    workers: int
    beyond: int
    growth: float
    cause: str

    def parts(self, some: int, others: int) -> bool:
        """Whether two counts lie on different sides."""
        return (some > self.workers) != (others > self.workers)


def efficiency(point: MeasuredPoint, base: MeasuredPoint) -> float:
    """Throughput per worker, against that of the smallest count."""
    return point.images_per_second / point.workers / (base.images_per_second / base.workers)


def gains(points: Sequence[MeasuredPoint]) -> list[float]:
    """For each point but the first the exponent of growth since the one before: 1 is ideal, 0 no growth."""
    return [
        math.log(point.images_per_second / before.images_per_second) / math.log(point.workers / before.workers)
        for before, point in pairwise(points)
    ]


def find_knee(points: Sequence[MeasuredPoint]) -> Knee | None:
    """The first place where throughput, which has grown so far, suddenly grows little or falls."""
    steps = pairwise(points[1:])
    for (before, after), (point, following) in zip(pairwise(gains(points)), steps, strict=True):
        fall = min(1.0, before) - after
        if (fall >= KNEE_FALL and after < FLAT) or (_leaves_node(point, following) and fall >= NODE_FALL):
            growth = following.images_per_second / point.images_per_second
            return Knee(point.workers, following.workers, growth, _cause(point, following))
    return None


def _leaves_node(point: MeasuredPoint, following: MeasuredPoint) -> bool:
    return point.nodes == 1 and following.nodes is not None and following.nodes > 1


def _cause(point: MeasuredPoint, following: MeasuredPoint) -> str:
    if _leaves_node(point, following):
        return "where the workers reach a second node"
    if following.oversubscribed and not point.oversubscribed:
        return "where the cores run out"
    return "as at the boundary of a node" if following.nodes is None else "at no boundary that was recorded"


def super_linear(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """The points of more throughput per worker than the smallest count has, beyond the spread of both."""
    base = points[0]
    spread = (base.high - base.low) / 2 / base.images_per_second
    return [
        point
        for point in points[1:]
        if efficiency(point, base) > 1 + MARGIN + spread + (point.high - point.low) / 2 / point.images_per_second
    ]


def remarks_of(points: Sequence[MeasuredPoint], knee: Knee | None) -> list[str]:
    """One remark for each thing that is seen in the points."""
    remarks = (_super_linear_remark(points), _knee_remark(points, knee), _core_remark(points))
    return [remark for remark in remarks if remark]


def _super_linear_remark(points: Sequence[MeasuredPoint]) -> str:
    above = [f"{point.workers} workers ({efficiency(point, points[0]):.2f})" for point in super_linear(points)]
    steps = [
        f"{after.images_per_second / before.images_per_second:.2f} times from {before.workers} to {after.workers}"
        for (before, after), gain in zip(pairwise(points), gains(points), strict=True)
        if gain > STEEP
    ]
    seen = [f"efficiency is above 1 with {listed(above)}"] if above else []
    seen += [f"throughput grows {listed(steps)} workers"] if steps else []
    if not seen:
        return ""
    return f"super-linear: {'; '.join(seen)}. The model has no term for this, and it stays in the errors"


def _knee_remark(points: Sequence[MeasuredPoint], knee: Knee | None) -> str:
    if knee is None:
        return ""
    grows = f"falls to {knee.growth:.2f} times" if knee.growth < 1 else f"grows only {knee.growth:.2f} times"
    sides = [[str(p.workers) for p in points if (p.workers > knee.workers) == beyond] for beyond in (False, True)]
    ways = " or ".join(f"--from {','.join(side)}" for side in sides if len(side) > 1)
    return (
        f"knee at {knee.workers} workers, {knee.cause}: from {knee.workers} to {knee.beyond} workers throughput "
        f"{grows}. One set of parameters does not hold on both sides; {ways} fits one of them"
    )


def _core_remark(points: Sequence[MeasuredPoint]) -> str:
    shared = [str(point.workers) for point in points if point.oversubscribed]
    if not shared:
        return ""
    return (
        f"more workers than cores with {listed(shared)} workers: they wait for cores, which the model takes for a cost "
        "of scaling. Its predictions hold for no machine with a core a worker"
    )


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
