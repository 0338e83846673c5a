"""Helpers that scripts import from here: build features, and some general-purpose functions."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from horovod.common.exceptions import HorovodVersionMismatchError as HorovodVersionMismatchError
from horovod.common.exceptions import get_version_mismatch_message as get_version_mismatch_message
from lockstep.hvd import ccl_built as ccl_built
from lockstep.hvd import cuda_built as cuda_built
from lockstep.hvd import ddl_built as ddl_built
from lockstep.hvd import gloo_built as gloo_built
from lockstep.hvd import mpi_built as mpi_built
from lockstep.hvd import nccl_built as nccl_built
from lockstep.hvd import rocm_built as rocm_built
from lockstep.hvd.ops.allreduce import resolve_operation


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether Horovod's API for a framework is available: only for "torch"."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework can use a GPU on this machine."""
    return extension_available(ext_base_name) and cuda_built() and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of workers is a power of 2, as Adasum needs."""
    return num_rank.bit_count() == 1


def get_ext_suffix() -> str:
    """Return the file name suffix of compiled modules."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Accept any version of a framework: Lockstep has no compiled code."""


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return a function that maps `op` and the deprecated `average` to an operation; ValueError if both are given."""
    return resolve_operation


def is_iterable(x: Any) -> bool:
    """Return whether an object is iterable."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least `target`, which has the form major.minor.patch.

    Raises:
        ValueError: An argument is not a string, or `target` has another form.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions must be strings, got {ver!r} and {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"target must have the form major.minor.patch, got {target}")
    return bool(TorchVersion(ver) >= target)
