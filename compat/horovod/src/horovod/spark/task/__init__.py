"""What a worker knows of its Spark task; `lockstep.integrations.seats` does the work."""

from lockstep.integrations.seats import own_gpus as get_available_devices

__all__ = ["get_available_devices"]
