"""Elastic jobs on Ray, which are refused with the alternatives."""

from __future__ import annotations

from typing import Any, NoReturn

INSTEAD = (
    "use RayExecutor(settings, num_workers=...), or Ray Train, which restarts from a checkpoint: "
    "ray.train.horovod.HorovodTrainer with RunConfig(failure_config=FailureConfig(max_failures=...))"
)


def refuse(name: str) -> NoReturn:
    """Raise NotImplementedError with the alternatives.

    Args:
        name: The refused class or argument.
    """
    raise NotImplementedError(f"{name}: elastic jobs on Ray are not supported; {INSTEAD}")


class RayHostDiscovery:
    """Refused, as `ElasticRayExecutor` is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse("RayHostDiscovery")


class ElasticRayExecutor:
    """Refused.

    Raises:
        NotImplementedError: Always; so does `create_settings`.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse("ElasticRayExecutor")

    @staticmethod
    def create_settings(*_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError with the alternatives."""
        refuse("ElasticRayExecutor")
