"""The sampler of `lockstep.hvd.elastic.sampler`."""

from lockstep.hvd.elastic.sampler import ElasticSampler as ElasticSampler
