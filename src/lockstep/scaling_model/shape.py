"""What a series shows that the model has no term for: super-linear points, knees, workers that share cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lockstep.scaling_model.series import Point

# Throughput grows with workers^gain between two counts. From one doubling to the next the gains of this model's curves
# fall by less than 0.4, so a fall by 0.5 to less than half of ideal is a break; at the step to a second node, 0.3 is.
KNEE_FALL, NODE_FALL, FLAT = 0.5, 0.3, 0.5
MARGIN = 0.02  # of a measured efficiency, beside its own spread, before it counts as above 1


class Knee(NamedTuple):
    """The last count before growth breaks off, and the next one measured."""

    workers: int
    beyond: int
    gain: float
    at_node: bool

    def parts(self, some: int, others: int) -> bool:
        """Whether two counts lie on different sides."""
        return (some > self.workers) != (others > self.workers)


def efficiency(point: Point, base: Point) -> float:
    """Throughput per worker, against that of the smallest count."""
    return point.images_per_second / point.workers / (base.images_per_second / base.workers)


def gains(points: Sequence[Point]) -> list[float]:
    """For each point but the first the exponent of growth since the one before: 1 is ideal, 0 no growth."""
    return [
        math.log(point.images_per_second / before.images_per_second) / math.log(point.workers / before.workers)
        for before, point in pairwise(points)
    ]


def find_knee(points: Sequence[Point]) -> Knee | None:
    """The first place where throughput, which has grown so far, suddenly grows little or falls."""
    growth = gains(points)
    for index in range(1, len(growth)):
        before, after = min(1.0, growth[index - 1]), growth[index]
        at_node = _is_first_step_off_a_node(points[index], points[index + 1])
        falls = before - after
        if (falls >= KNEE_FALL and after < FLAT) or (at_node and falls >= NODE_FALL):
            return Knee(points[index].workers, points[index + 1].workers, after, at_node)
    return None


def _is_first_step_off_a_node(point: Point, following: Point) -> bool:
    return point.nodes == 1 and following.nodes is not None and following.nodes > 1


def super_linear(points: Sequence[Point]) -> list[Point]:
    """The points of more throughput per worker than the smallest count has, beyond the spread of both."""
    base = points[0]
    spread = (base.high - base.low) / 2 / base.images_per_second
    return [
        point
        for point in points[1:]
        if efficiency(point, base) > 1 + MARGIN + spread + (point.high - point.low) / 2 / point.images_per_second
    ]


def remarks_of(points: Sequence[Point], knee: Knee | None) -> list[str]:
    """One sentence or two for each thing that is seen in the points."""
    return [*_super_linear_remarks(points), *_knee_remarks(knee), *_core_remarks(points)]


def _super_linear_remarks(points: Sequence[Point]) -> list[str]:
    remarks = []
    above = super_linear(points)
    if above:
        named = listed(f"{point.workers} workers ({efficiency(point, points[0]):.2f})" for point in above)
        remarks.append(
            f"super-linear: efficiency above 1 with {named}. The model has no term for it: it stays in the residuals. "
            "Caches, memory or a slow first measurement can be the cause"
        )
    known = {point.workers for point in above}
    for before, point, gain in zip(points, points[1:], gains(points), strict=False):
        if gain > 1 + 5 * MARGIN and point.workers not in known:
            remarks.append(
                f"super-linear step: from {before.workers} to {point.workers} workers throughput grows "
                f"{point.images_per_second / before.images_per_second:.2f} times; the model has no term for it"
            )
    return remarks


def _knee_remarks(knee: Knee | None) -> list[str]:
    if knee is None:
        return []
    where = "where the workers reach a second node" if knee.at_node else "as at the boundary of a node"
    return [
        f"knee at {knee.workers} workers, {where}: from {knee.workers} to {knee.beyond} throughput "
        f"{_growth(knee)}. One set of parameters does not hold on both sides: trust no prediction beyond "
        f"{knee.workers} workers, and fit one side with --from"
    ]


def _growth(knee: Knee) -> str:
    ratio = (knee.beyond / knee.workers) ** knee.gain
    return f"falls to {ratio:.2f} times" if ratio < 1 else f"grows only {ratio:.2f} times"


def _core_remarks(points: Sequence[Point]) -> list[str]:
    shared = [point for point in points if point.oversubscribed]
    if not shared:
        return []
    counts = listed(str(point.workers) for point in shared)
    return [
        f"more workers than cores: {counts} workers wait for each other's cores, which the model takes for a cost of "
        "scaling; predictions are of no machine with enough cores"
    ]


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
