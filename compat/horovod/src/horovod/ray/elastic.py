"""Elastic jobs on Ray; implemented by `lockstep.integrations.ray`."""

from lockstep.integrations.ray.elastic_actors import RayHostDiscovery
from lockstep.integrations.ray.executor import ElasticRayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]
