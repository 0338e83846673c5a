"""The horovod package, provided by Lockstep: it re-exports names, except in `ray`."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import spec_from_loader
from types import ModuleType
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


PYTORCH = "Lockstep provides Horovod's API only for PyTorch (horovod.torch). "
SPARK = "To run a function with horovod.torch in Spark's tasks, use pyspark.ml.torch.distributor.TorchDistributor. "
ESTIMATORS = (
    f"Lockstep has no Spark estimators. {SPARK}Write the DataFrame with DataFrame.write.parquet, and let the function "
    "read these files"
)
NOT_PROVIDED = {
    "horovod.data": f"{PYTORCH}To load data in background processes, use torch.utils.data.DataLoader with num_workers "
    "and persistent_workers",
    "horovod.keras": f"{PYTORCH}For Keras, use keras.distribution or the original Horovod",
    "horovod.mxnet": f"{PYTORCH}For MXNet, which was retired in 2023, use the original Horovod",
    "horovod.tensorflow": f"{PYTORCH}For TensorFlow, use tf.distribute.MultiWorkerMirroredStrategy or the original "
    "Horovod",
    "horovod.runner.elastic.discovery": "Elastic jobs on Ray are not supported. For an elastic job, use horovodrun "
    "--min-np with --host-discovery-script",
    **dict.fromkeys(["horovod.spark.runner", "horovod.spark.task"], SPARK.rstrip(". ")),
    **dict.fromkeys([f"horovod.spark.{name}" for name in ("common", "keras", "lightning", "torch")], ESTIMATORS),
}


class _NotProvided(MetaPathFinder, Loader):
    """Raises an ImportError that names the alternative when a module of Horovod that Lockstep lacks is imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in NOT_PROVIDED else None

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"{module.__name__}: {NOT_PROVIDED[module.__name__]}")


sys.meta_path.append(_NotProvided())


def __getattr__(name: str) -> Any:
    """Import `run`, `runner` and `common` on first use: training needs no launcher, and the launcher needs no torch."""
    if name == "run":
        from lockstep.launch.controller.run_function import run

        return run
    if name in ("common", "runner"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
