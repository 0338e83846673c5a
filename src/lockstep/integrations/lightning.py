"""The old path of `lockstep.lightning`."""

from lockstep.lightning import LockstepEnvironment, LockstepStrategy

__all__ = ["LockstepEnvironment", "LockstepStrategy"]
