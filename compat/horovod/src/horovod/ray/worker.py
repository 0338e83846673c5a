"""The actor of `lockstep.integrations.ray.actor`."""

from lockstep.integrations.ray.actor import BaseHorovodWorker

__all__ = ["BaseHorovodWorker"]
