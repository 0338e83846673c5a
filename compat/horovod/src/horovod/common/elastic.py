"""The states and the loop of elastic training; implemented by `lockstep.hvd.elastic`."""

from lockstep.hvd.elastic.loop import run_fn
from lockstep.hvd.elastic.state import HostUpdateResult, ObjectState, State
from lockstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "run_fn",
]
