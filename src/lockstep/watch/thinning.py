"""A curve of bounded size for runs of any length."""

from __future__ import annotations


class Thinned:
    """The points of a curve, in order of x. When there are `most`, neighboring pairs are averaged.

    Args:
        most: Maximum number of points, even; after averaging, half of them are left.
    """

    def __init__(self, most: int = 2048):
        self._most = most
        self._stride = 1  # points averaged into one
        self._points: list[tuple[float, float]] = []
        self._open: list[tuple[float, float]] = []  # points of the next average

    def add(self, x: float, y: float) -> None:
        self._open.append((x, y))
        if len(self._open) < self._stride:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) == self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(list(pair)) for pair in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(x, y) of the averaged points, including the last, incomplete average."""
        return [*self._points, _mean(self._open)] if self._open else list(self._points)

    def __bool__(self) -> bool:
        return bool(self._points or self._open)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
