"""The states of `lockstep.hvd.elastic.state`."""

from lockstep.hvd.elastic.state import *  # noqa: F403
from lockstep.hvd.elastic.state import __all__ as __all__
