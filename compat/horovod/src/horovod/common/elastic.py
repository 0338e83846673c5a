"""The states and the loop of elastic training; implemented by `lockstep.hvd.elastic`."""

from lockstep.hvd.elastic.loop import run_fn as run_fn
from lockstep.hvd.elastic.state import HostUpdateResult as HostUpdateResult
from lockstep.hvd.elastic.state import ObjectState as ObjectState
from lockstep.hvd.elastic.state import State as State
from lockstep.hvd.exceptions import HorovodInternalError as HorovodInternalError
from lockstep.hvd.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
