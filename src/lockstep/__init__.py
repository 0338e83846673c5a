"""Lockstep: synchronous data-parallel training for PyTorch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.exact_loader import ExactLoader as ExactLoader
    from lockstep.files.staged import staged as staged
    from lockstep.run.connect import TrainingWorld as TrainingWorld
    from lockstep.run.connect import connect as connect
    from lockstep.run.training_run import TrainingRun as TrainingRun
    from lockstep.world.generations import survive as survive

__version__ = "0.1.0"
_HOMES = {
    "ExactLoader": "lockstep.data.exact_loader",
    "TrainingWorld": "lockstep.run.connect",
    "connect": "lockstep.run.connect",
    "TrainingRun": "lockstep.run.training_run",
    "survive": "lockstep.world.generations",
    "staged": "lockstep.files.staged",
}
if _packages := os.environ.get("LOCKSTEP_PACKAGES"):  # in a container, whose image may lack some
    sys.path.append(os.path.join(_packages, "last"))
__all__ = ["ExactLoader", "TrainingRun", "TrainingWorld", "connect", "staged", "step", "survive"]


if not TYPE_CHECKING:  # type checkers find the names above, and refuse others

    def __getattr__(name: str) -> Any:
        """Import a public name when it is used first, because torch takes a second."""
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


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
