"""The states and the loop of elastic training; `lockstep.hvd.elastic` does the work."""

from lockstep.hvd.elastic.base import ObjectState, State
from lockstep.hvd.elastic.loop import run_fn

__all__ = ["ObjectState", "State", "run_fn"]
