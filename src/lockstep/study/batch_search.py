"""Which batch sizes to try: doubled until one does not fit, then halfway between. Pure."""

from __future__ import annotations

from collections.abc import Mapping

PRECISION = 16  # the largest that fits is found to within a 16th


def next_size(found: Mapping[int, bool], first: int, most: int | None) -> int | None:
    """The size to try after those found to fit or not; None where nothing is left to find.

    Args:
        found: For each size tried whether it fits; more than one that does not never fits.
        first: The size to begin with.
        most: No size above this; None: no bound.
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
