"""horovod.spark, whose functions name PySpark's own launcher of torch workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["run", "run_elastic"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *more: Any,
    **options: Any,
) -> NoReturn:
    """Raise NotImplementedError with the lines that start `fn` with PySpark's TorchDistributor."""
    workers = "sc.defaultParallelism" if num_proc is None else num_proc
    raise NotImplementedError(
        "horovod.spark.run is not supported; hvd.init() connects the workers that PySpark starts: "
        "from pyspark.ml.torch.distributor import TorchDistributor; "
        f"TorchDistributor(num_processes={workers}, local_mode=False, use_gpu=False)"
        f".run({getattr(fn, '__name__', 'train')}, *args, **kwargs)"
    )


run_elastic = run
