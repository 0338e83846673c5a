"""A time limit for several activities."""

from lockstep.integrations.timeout import Timeout, TimeoutException

__all__ = ["Timeout", "TimeoutException"]
