"""The executor and the coordinator of `lockstep.integrations.ray`."""

from lockstep.integrations.ray.coordinator import Coordinator
from lockstep.integrations.ray.executor import RayExecutor
from lockstep.integrations.ray.executor import RaySettings as MiniSettings

__all__ = ["Coordinator", "MiniSettings", "RayExecutor"]
