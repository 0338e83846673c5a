"""What workers report; `lockstep.integrations.ray.log` does the work."""

from lockstep.integrations.ray.log import configure, log

__all__ = ["configure", "log"]
