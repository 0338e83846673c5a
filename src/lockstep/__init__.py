"""Lockstep: synchronous data-parallel training for PyTorch."""

from __future__ import annotations

import sys

__version__ = "0.1.0"


def step(samples: int | None = None) -> None:
    """Say that this worker has taken a training step, in a program that `lockstep run` or a study observes.

    For programs whose steps cannot be seen, because torch.compile has compiled a step as a whole, or because they have
    no optimizer of torch. From the first call on, only these calls count as steps. Does nothing in other programs.

    Args:
        samples: The number of training samples of this worker in the step; None: those of its DataLoader.
    """
    observer = sys.modules.get("lockstep.world.observer")
    if observer is not None and observer.current is not None:
        observer.current.take_step(samples)
