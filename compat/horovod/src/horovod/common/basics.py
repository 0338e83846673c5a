"""`HorovodBasics`, the process model as an object; implemented by `lockstep.hvd.basics`."""

from typing import Any

from lockstep import hvd
from lockstep.hvd import basics


class HorovodBasics:
    """Initialization, shutdown, ranks, sizes and build features. The arguments are ignored."""

    Average, Sum, Adasum = hvd.Average, hvd.Sum, hvd.Adasum
    Min, Max, Product = hvd.Min, hvd.Max, hvd.Product

    def __init__(self, pkg_path: str, *args: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in dir(hvd) or name == "is_homogeneous":
            return getattr(basics, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
