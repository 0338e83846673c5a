"""Horovod's elastic training: a training function goes on, with the state of its last commit, when workers change."""

# `__all__` names no modules: horovod.torch.elastic, which takes its names, has modules of its own.
from lockstep.hvd.basics import init, shutdown
from lockstep.hvd.elastic import sampler as sampler
from lockstep.hvd.elastic import state as state
from lockstep.hvd.elastic.loop import run, run_fn
from lockstep.hvd.elastic.sampler import ElasticSampler
from lockstep.hvd.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]
