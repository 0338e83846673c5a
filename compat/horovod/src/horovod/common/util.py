"""The helpers that scripts take from here: what is built in, as `horovod.torch` says it, and a few of general use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from lockstep.hvd import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built

__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

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
