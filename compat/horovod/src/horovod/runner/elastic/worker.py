"""Host changes of elastic jobs; implemented by `lockstep.hvd.elastic`."""

from lockstep.hvd.elastic.state import HostUpdateResult as HostUpdateResult
