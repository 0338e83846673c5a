"""What a process keeps of a run when the loss of another worker interrupts it, besides imports and compiled code.

The state is not kept: the next generation takes it from the newest snapshot in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.sets import ImageData


@dataclass
class KeptRun:
    """A run as this process has it, from one generation to the next.

    Attributes:
        reached: The newest complete step, to count how many are repeated.
        data: The data set, if a loss has interrupted the run.
    """

    reached: int = 0
    data: ImageData | None = None


_kept: dict[str, KeptRun] = {}


def kept_run(folder: Path) -> KeptRun:
    """Return what this process keeps of the run in a folder."""
    return _kept.setdefault(os.path.abspath(folder), KeptRun())
