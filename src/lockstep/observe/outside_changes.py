"""Changes a program from outside, for `lockstep explain --try`: a communication hook, or arguments of its loaders."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

PLAIN_STEPS = 2  # before PowerSGD, which needs at least these


def apply(change: str) -> None:
    """Apply a change to what this process makes from now on: compress, powersgd, loader=N or pin_memory.

    Raises:
        ValueError: The change is unknown.
    """
    kind, _, value = change.partition("=")
    if kind in COMPRESSIONS:
        _before_first_forward(COMPRESSIONS[kind])
    elif kind == "loader":
        _change_loaders(num_workers=int(value))
    elif kind == "pin_memory":
        _change_loaders(pin_memory=True)
    else:
        raise ValueError(f"unknown change: {change}")


def _before_first_forward(change: Callable[[Any], None]) -> None:
    """Change each DistributedDataParallel before its first forward pass, when the program has set it up."""
    from torch.nn.modules.module import register_module_module_registration_hook
    from torch.nn.parallel import DistributedDataParallel

    def registered(owner: Any, name: str, module: Any) -> None:
        if name == "module" and module is not None and isinstance(owner, DistributedDataParallel):
            handle = owner.register_forward_pre_hook(lambda wrapper, _: first_call(wrapper))

            def first_call(wrapper: Any) -> None:
                handle.remove()
                change(wrapper)

    register_module_module_registration_hook(registered)


def _compress(wrapper: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if not wrapper._comm_hooks:
        try:
            wrapper.register_comm_hook(None, default_hooks.bf16_compress_hook)
        except TypeError:  # this build of torch has it for GPUs only
            wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _approximate(wrapper: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    for _, state in wrapper._comm_hooks:  # of `lockstep train`, which may begin with many uncompressed steps
        if isinstance(state, powersgd.PowerSGDState):
            state.start_powerSGD_iter = min(state.start_powerSGD_iter, PLAIN_STEPS)
    if wrapper._comm_hooks:
        return
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=PLAIN_STEPS)

    def hook(state: Any, bucket: Any) -> Any:
        future = powersgd.powerSGD_hook(state, bucket)
        if bucket.buffer().device.type == "cpu":
            future.wait()  # Gloo matches collectives by their order, which differs with several buckets in flight
        return future

    hook.__annotations__ = {}  # torch compares them with its own types
    wrapper.register_comm_hook(state, hook)


COMPRESSIONS = {"compress": _compress, "powersgd": _approximate}


def _change_loaders(**changed: Any) -> None:
    """Change arguments of the loaders of map-style data; of others, each process would load all samples."""
    data = sys.modules["torch"].utils.data
    begin = data.DataLoader.__init__
    signature = inspect.signature(begin)

    @functools.wraps(begin)
    def begin_changed(*arguments: Any, **named: Any) -> None:
        bound = signature.bind(*arguments, **named)
        if not isinstance(bound.arguments.get("dataset"), data.IterableDataset):
            bound.arguments.update(changed)
        begin(*bound.args, **bound.kwargs)

    data.DataLoader.__init__ = begin_changed
