"""The horovod package, provided by Lockstep: it re-exports names, except in `ray` and `spark`."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any

try:
    distribution("horovod")
except PackageNotFoundError:
    pass
else:
    raise ImportError(
        "Horovod and its replacement lockstep-horovod are both installed, and they share files. Uninstall both: "
        "`pip uninstall horovod lockstep-horovod`. Then install one of them again: lockstep-horovod, or horovod"
    )

__version__ = "0.28.1"  # the Horovod release whose API this is
lockstep_version = version("lockstep-torch")


def __getattr__(name: str) -> Any:
    """Import `run`, `runner` and `common` on first use: training needs no launcher, and the launcher needs no torch."""
    if name == "run":
        from lockstep.launch.controller.run_function import run

        return run
    if name in ("common", "runner"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
