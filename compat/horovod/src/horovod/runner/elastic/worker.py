"""The changes of hosts that a state hears of; `lockstep.hvd.elastic` does the work."""

from lockstep.hvd.elastic.base import HostUpdateResult

__all__ = ["HostUpdateResult"]
