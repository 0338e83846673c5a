"""Horovod's elastic training: a training function goes on, with the state of its last commit, when workers change."""

from lockstep.hvd.basics import init, shutdown
from lockstep.hvd.elastic import sampler, state
from lockstep.hvd.elastic.loop import run, run_fn
from lockstep.hvd.elastic.sampler import ElasticSampler
from lockstep.hvd.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "sampler", "shutdown", "state"]
