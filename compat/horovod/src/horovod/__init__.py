"""Horovod's package, provided by Lockstep: nothing but names handed on."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any

try:
    distribution("horovod")
except PackageNotFoundError:
    pass
else:
    raise ImportError(
        "both Horovod and lockstep-horovod, which takes its place, are installed here. To keep Lockstep: "
        "`pip uninstall horovod lockstep-horovod`, then install lockstep-horovod again, as they share files. "
        "To keep Horovod: `pip uninstall horovod lockstep-horovod`, then install horovod again"
    )

__version__ = "0.28.1"  # the release of Horovod whose API this is
lockstep_version = version("lockstep-torch")


def __getattr__(name: str) -> Any:
    """Import `run`, `runner` and `common` on first use: training needs no launcher, and the launcher no torch."""
    if name == "run":
        from lockstep.launch.controller.run_function import run

        return run
    if name in ("common", "runner"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
