"""The executor of `lockstep.integrations.ray.executor`."""

from lockstep.integrations.ray.executor import RayExecutor
from lockstep.integrations.ray.executor import RaySettings as MiniSettings

__all__ = ["MiniSettings", "RayExecutor"]
