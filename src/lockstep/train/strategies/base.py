"""The base strategy, for a single process, and DataParallel; also the conversion of batch norms for the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lockstep.diagnosis.phases import Phase
from lockstep.errors import ConfigError
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.models.trial_forward import user_frame
from lockstep.world import accelerator

Tensors = dict[str, torch.Tensor]


@dataclass
class Traffic:
    """Bytes of gradients that this worker sent in collectives since the last `take`, and their uncompressed size."""

    plain_bytes: int = 0
    sent_bytes: int = 0

    def take(self) -> Traffic:
        """Return the counts and reset them."""
        taken = Traffic(self.plain_bytes, self.sent_bytes)
        self.plain_bytes = self.sent_bytes = 0
        return taken


class Strategy:
    """The interface between the training loop and a strategy; this one is for a single worker."""

    name = "single"
    workers_averaged = 1
    """Number of workers over which gradients are averaged; scale the loss by it to get the mean over all samples."""

    remembers_gradients = False
    """Whether gradients affect what later steps send, so that an overflow must be known before the next step."""
    waits_in: tuple[Phase, ...] = ("reduction",)
    """Phases of a step in which this worker may wait for others."""
    gathers_state = False
    """Whether a snapshot needs `gather_state`, and so can be taken only on rank 0."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """Bytes before and after compression; 0 without compression."""

    def synchronize_batch_norm(self, model: nn.Module) -> None:
        """Make the model's batch norms compute statistics over all workers."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training."""
        return model

    def build_optimizer(
        self, kind: type[Optimizer], groups: Sequence[dict[str, Any]], settings: Mapping[str, Any]
    ) -> Optimizer:
        """Build an optimizer of a class over parameter groups."""
        return kind(groups, **settings)

    def mark_reduction(self, losses: torch.Tensor, mark: Callable[[], None]) -> None:
        """Call `mark` in the backward pass of `losses` when it begins to wait for other workers, if it does."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Surround each forward and backward pass of a step; gradients need to be reduced only in the last one."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """Wait after the last backward pass until the gradients are reduced."""

    def forget_gradients(self) -> None:
        """Drop state derived from gradients, after one was NaN or infinite."""

    def rescale(self, factor: float) -> None:
        """Scale state derived from gradients by `factor`, because the loss scale changed."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's values to all replicas, in place: initial weights, batch norm statistics before evaluations."""

    def gather_state(self, optimizer: Optimizer) -> None:
        """Send the state of other workers to rank 0, before it takes a snapshot. Collective."""

    def state_dict(self) -> Tensors:
        """Return the state of all workers for a checkpoint, on rank 0 after `gather_state`."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Restore a state of any number of workers."""

    def close(self) -> None:
        """Release resources at the end of the run."""


def mark_before_wait(losses: torch.Tensor, mark: Callable[[], None]) -> None:
    """Call `mark` at the end of the backward pass of `losses`, before the strategy's wait for other workers.

    Strategies queue their wait with a gradient of a parameter, so this call precedes it, except in a nested backward
    pass (checkpoints with use_reentrant=True).
    """
    losses.register_hook(lambda _: Variable._execution_engine.queue_callback(mark))


PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_batch_norm(model: nn.Module) -> None:
    """Check that all batch norms can be converted without losing functionality.

    Raises:
        ConfigError: A batch norm does more than torch's, such as timm's norms with an activation.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in (*PLAIN, nn.SyncBatchNorm, GlobalBatchNorm):
            raise ConfigError(
                f"--sync-bn cannot replace {type(module).__name__} (layer {name}), which does more than batch norm; "
                f"leave out --sync-bn, or choose a model with torch's BatchNorm"
            )


def has_other_buffers(model: nn.Module) -> bool:
    """Return whether a module other than batch norm has buffers, on which its forward pass may depend."""
    known = (*PLAIN, nn.SyncBatchNorm, GlobalBatchNorm)
    return any(
        type(module) not in known and any(True for _ in module.buffers(recurse=False)) for module in model.modules()
    )


def convert_batch_norm(model: nn.Module, kind: type[_BatchNorm], **attributes: Any) -> None:
    """Make each batch norm one of another class, such as nn.SyncBatchNorm, which computes over all workers.

    Each stays the same object, so that all references to it, its hooks and its attributes hold. The model's first
    forward pass in training refuses what was not converted, unless torch.compile runs it.
    """
    for module in model.modules():
        if type(module) in PLAIN:
            module.__class__ = kind
            vars(module).update(attributes)
    first = _FirstForward()
    model.register_forward_pre_hook(first.begin)
    model.register_forward_hook(first.end, always_call=True)


class _FirstForward:
    """Hooks that watch a model's first forward pass in training."""

    def __init__(self) -> None:
        self._watch: _BatchNormWatch | None = None
        self._is_done = False

    def begin(self, model: nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling() and model.training and not self._is_done and self._watch is None:
            self._watch = _BatchNormWatch()
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._watch is not None:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watch, self._is_done = None, True


class _BatchNormWatch(TorchFunctionMode):
    """Refuses batch statistics of one worker, such as of a module in a plain list, which `modules` does not find."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.batch_norm and (kwargs or {}).get("training"):
            where = user_frame(reversed([*walk_stack(None)]))
            raise ConfigError(
                f"--sync-bn (sync_bn=True) has not replaced a batch norm of {args[0].shape[1]} features{where}, which "
                f"uses the statistics of one worker; register it as a submodule (nn.ModuleList instead of a list), or "
                f"leave out --sync-bn"
            )
        return function(*args, **(kwargs or {}))


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Private names of nn.Module, which has no public way to skip hooks."""


@contextmanager
def bare_forward(module: nn.Module) -> Iterator[None]:
    """Make the module, called without arguments, return a scalar (float32, 0) that depends on all trained parameters.

    Gradients arrive in reverse order of definition, in one pass that runs the hooks of the module's wrappers. Its own
    hooks, which may look at inputs, are not called.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def touch_parameters() -> torch.Tensor:
        # Autograd runs the newest branch first, so the last parameter's gradient arrives first.
        return torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()

    own_forward = vars(module).get("forward")
    own_hooks = {name: vars(module)[name] for name in HOOKS if name in vars(module)}
    vars(module).update({name: OrderedDict() for name in own_hooks})
    module.forward = touch_parameters
    try:
        yield
    finally:
        vars(module).update(own_hooks)
        del module.forward
        if own_forward is not None:
            module.forward = own_forward


class DataParallelStrategy(Strategy):
    """torch's nn.DataParallel; with at most one GPU, the plain module. The batch size is per process."""

    name = "dp"

    def wrap(self, model: nn.Module) -> nn.Module:
        kinds = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
        return Parallel(model, kinds.pop()) if kinds and accelerator.count() > 1 else model


class Parallel(nn.DataParallel[nn.Module]):
    """DataParallel whose threads autocast to the caller's dtype; torch's version uses the default, float16."""

    def __init__(self, model: nn.Module, device_type: str):
        super().__init__(CallersAutocast(model, device_type))

    def forward(self, *inputs: Any) -> Any:
        cast(CallersAutocast, self.module).follow()
        return super().forward(*inputs)


class CallersAutocast(nn.Module):
    """A module with the autocast settings of the thread that called `follow`."""

    def __init__(self, model: nn.Module, device_type: str):
        super().__init__()
        self.model = model
        self._device_type = device_type
        self.follow()

    def follow(self) -> None:
        """Read this thread's autocast settings."""
        self._enabled = torch.is_autocast_enabled(self._device_type)
        self._dtype = torch.get_autocast_dtype(self._device_type)

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._enabled):
            return self.model(*inputs)
