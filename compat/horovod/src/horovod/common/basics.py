"""The process model as an object, which each framework's module had; `lockstep.hvd.basics` does the work."""

from typing import Any

from lockstep import hvd
from lockstep.hvd import basics


class HorovodBasics:
    """Starting and stopping, the worker's place and what is built in. Takes, and ignores, the path of a library."""

    Average, Sum, Adasum = hvd.Average, hvd.Sum, hvd.Adasum
    Min, Max, Product = hvd.Min, hvd.Max, hvd.Product

    def __init__(self, pkg_path: str, *args: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in dir(hvd) or name == "is_homogeneous":
            return getattr(basics, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
