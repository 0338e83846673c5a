"""The helpers that scripts take from here: what is built in, as `horovod.torch` says it, and a few of general use."""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from horovod.common.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from lockstep.hvd import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built
from lockstep.hvd.ops.allreduce import resolve_operation

__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "get_version_mismatch_message",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether Horovod's API for this framework is here: it is for "torch"."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError where Horovod's API for a framework, such as "horovod.tensorflow", is not here."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(f"{ext_name}: Lockstep provides Horovod's API for PyTorch alone (horovod.torch)")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework can use a GPU here."""
    return extension_available(ext_base_name) and cuda_built() and _torch_finds_a_gpu()


def _torch_finds_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum can take this number of workers."""
    return num_rank.bit_count() == 1


def split_list(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Consecutive parts whose lengths differ by one at most, the longer ones first."""
    short, longer = divmod(len(items), count)
    ends = [part * short + min(part, longer) for part in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(ends)]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; those given as None stay as they are."""
    former = {name: os.environ.get(name) for name, value in variables.items() if value is not None}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def get_ext_suffix() -> str:
    """How the file of a compiled module ends here."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where a compiled module of Horovod would be; Lockstep has none."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Accept any version of a framework: nothing was built against one."""


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """A function that makes of `op` and the deprecated `average` one operation; ValueError where both are given."""
    return resolve_operation


def is_iterable(x: Any) -> bool:
    """Whether an object can be iterated over."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is the target, written as major.minor.patch, or later.

    Raises:
        ValueError: One is no text, or the target is written otherwise.
    """
    from torch.torch_version import TorchVersion

    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are texts, not {ver!r} and {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"the target has the form major.minor.patch, not {target}")
    return bool(TorchVersion(ver) >= target)
