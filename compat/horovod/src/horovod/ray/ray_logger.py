"""Reports from workers to callbacks; implemented by `lockstep.integrations.ray.log`."""

from lockstep.integrations.ray.log import configure, log

__all__ = ["configure", "log"]
