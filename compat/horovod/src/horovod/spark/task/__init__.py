"""The resources of a worker's Spark task; implemented by `lockstep.integrations.seats`."""

from lockstep.integrations.seats import own_gpus as get_available_devices

__all__ = ["get_available_devices"]
