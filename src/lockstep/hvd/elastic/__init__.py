"""Horovod's elastic training: when workers change, training continues from the last commit."""

# `__all__` has no modules: horovod.torch.elastic re-exports these names and has its own modules.
from lockstep.hvd.basics import init, shutdown
from lockstep.hvd.elastic import sampler as sampler
from lockstep.hvd.elastic import state as state
from lockstep.hvd.elastic.loop import run, run_fn
from lockstep.hvd.elastic.sampler import ElasticSampler
from lockstep.hvd.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]
