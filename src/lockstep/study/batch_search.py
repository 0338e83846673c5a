"""Choose the batch sizes to try: double until one does not fit, then bisect. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

PRECISION = 16  # the largest size that fits is found to within 1/16


def next_size(found: Mapping[int, bool], first: int, most: int | None) -> int | None:
    """Return the next size to try, or None if the search is complete.

    Args:
        found: Whether each size tried so far fits.
        first: The size to start with.
        most: The largest size to try; None for no limit.
    """
    fitting = max((size for size, fits in found.items() if fits), default=0)
    too_large = min((size for size, fits in found.items() if not fits), default=None)
    if too_large is None:
        wanted = 2 * fitting or first
        if most is not None and wanted > most:
            wanted = most
        return wanted if wanted not in found else None
    between = (fitting + too_large) // 2
    step = max(1, fitting // PRECISION)
    return between if too_large - fitting > step and between > 0 else None
