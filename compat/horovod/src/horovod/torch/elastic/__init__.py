"""Elastic training; implemented by `lockstep.hvd.elastic`."""

from horovod.torch.elastic import sampler, state
from lockstep.hvd.elastic import *  # noqa: F403
from lockstep.hvd.elastic import __all__ as _names

__all__ = [*_names, "sampler", "state"]
