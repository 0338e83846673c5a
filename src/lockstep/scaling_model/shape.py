"""Effects in a series that the model has no term for: super-linear points, knees, and workers that share cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lockstep.scaling_model.series import MeasuredPoint

# Throughput grows with workers^gain between two counts. From one doubling to the next, the gain of a model curve falls
# by less than 0.4. A fall by 0.5 to a gain below 0.5 is therefore a knee. At the step to a second node, 0.3 suffices.
KNEE_FALL, NODE_FALL, FLAT = 0.5, 0.3, 0.5
STEEP = 1.1  # a gain above this is not noise
MARGIN = 0.02  # an efficiency counts as above 1 if it exceeds 1 by this plus its spread


class Knee(NamedTuple):
    """The last count before throughput stops growing, the next measured count, the growth to it, and the cause."""

    workers: int
    beyond: int
    growth: float
    cause: str

    def separates(self, one: int, other: int) -> bool:
        """Whether two counts are on different sides of the knee."""
        return (one > self.workers) != (other > self.workers)


def efficiency(point: MeasuredPoint, base: MeasuredPoint) -> float:
    """Return the throughput per worker relative to that of `base`."""
    return point.images_per_second / point.workers / (base.images_per_second / base.workers)


def gains(points: Sequence[MeasuredPoint]) -> list[float]:
    """Return the exponent of growth from each point to the next: 1 is ideal, 0 is no growth."""
    return [
        math.log(point.images_per_second / before.images_per_second) / math.log(point.workers / before.workers)
        for before, point in pairwise(points)
    ]


def find_knee(points: Sequence[MeasuredPoint]) -> Knee | None:
    """Return the first count after which throughput suddenly stops growing or falls; None if there is none."""
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
        return "where a second node begins"
    if following.oversubscribed and not point.oversubscribed:
        return "where workers begin to share cores"
    return "possibly at a node boundary" if following.nodes is None else "not at a recorded node boundary"


def super_linear(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Return the points whose throughput per worker exceeds that of the smallest count by more than both spreads."""
    base = points[0]
    spread = (base.high - base.low) / 2 / base.images_per_second
    return [
        point
        for point in points[1:]
        if efficiency(point, base) > 1 + MARGIN + spread + (point.high - point.low) / 2 / point.images_per_second
    ]


def remarks_of(points: Sequence[MeasuredPoint], knee: Knee | None) -> list[str]:
    """Return one remark for each effect that the points show."""
    remarks = (_super_linear_remark(points), _knee_remark(points, knee), _core_remark(points))
    return [remark for remark in remarks if remark]


def _super_linear_remark(points: Sequence[MeasuredPoint]) -> str:
    above = [f"{point.workers} workers ({efficiency(point, points[0]):.2f})" for point in super_linear(points)]
    steps = [
        f"by a factor of {after.images_per_second / before.images_per_second:.2f} from {before.workers} to "
        f"{after.workers} workers"
        for (before, after), gain in zip(pairwise(points), gains(points), strict=True)
        if gain > STEEP
    ]
    seen = [f"efficiency is above 1 with {listed(above)}"] if above else []
    seen += [f"throughput grows {listed(steps)}"] if steps else []
    if not seen:
        return ""
    return f"super-linear: {'; '.join(seen)}. The model has no term for this, so its errors include it"


def _knee_remark(points: Sequence[MeasuredPoint], knee: Knee | None) -> str:
    if knee is None:
        return ""
    falls, grows = f"falls to {knee.growth:.2f} of its value", f"grows only by a factor of {knee.growth:.2f}"
    change = falls if knee.growth < 1 else grows
    sides = [[str(p.workers) for p in points if (p.workers > knee.workers) == beyond] for beyond in (False, True)]
    ways = " or ".join(f"--from {','.join(side)}" for side in sides if len(side) > 1)
    return (
        f"knee at {knee.workers} workers, {knee.cause}: from {knee.workers} to {knee.beyond} workers, throughput "
        f"{change}. One set of parameters cannot fit both sides; to fit one side, use {ways}"
    )


def _core_remark(points: Sequence[MeasuredPoint]) -> str:
    shared = [str(point.workers) for point in points if point.oversubscribed]
    if not shared:
        return ""
    return (
        f"more workers than cores with {listed(shared)} workers: the model counts waiting for cores as a cost of "
        "scaling, so its predictions do not apply to machines with a core per worker"
    )


def listed(names: Iterable[str]) -> str:
    """Join names with commas and "and"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
