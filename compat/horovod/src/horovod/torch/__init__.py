"""Horovod's API for PyTorch; `lockstep.hvd` does the work."""

from lockstep.hvd import *  # noqa: F403
from lockstep.hvd import __all__ as __all__
