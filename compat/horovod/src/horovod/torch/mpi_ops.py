"""The operations, by the module that scripts take them from; `lockstep.hvd` does the work."""

from lockstep.hvd import *  # noqa: F403
from lockstep.hvd.basics import is_homogeneous as is_homogeneous
