"""Elastic jobs on Ray; `lockstep.integrations.ray` does the work."""

from lockstep.integrations.ray.elastic_actors import RayHostDiscovery
from lockstep.integrations.ray.executor import ElasticRayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]
