"""The sampler of `lockstep.hvd.elastic.sampler`."""

from lockstep.hvd.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
