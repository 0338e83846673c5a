"""The exceptions of `lockstep.hvd.exceptions`."""

from lockstep.hvd.exceptions import HorovodInternalError as HorovodInternalError
from lockstep.hvd.exceptions import HorovodVersionMismatchError as HorovodVersionMismatchError
from lockstep.hvd.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from lockstep.hvd.exceptions import get_version_mismatch_message as get_version_mismatch_message
