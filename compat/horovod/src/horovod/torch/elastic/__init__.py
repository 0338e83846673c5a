"""Elastic training; `lockstep.hvd.elastic` does the work."""

from lockstep.hvd.elastic import *  # noqa: F403
from lockstep.hvd.elastic import __all__ as __all__
