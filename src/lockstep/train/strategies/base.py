"""The base strategy, for a single process, and DataParallel; also the conversion of batch norms for the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.diagnosis.phases import Phase
from lockstep.errors import ConfigError
from lockstep.models.global_batch_norm import GlobalBatchNorm, Peers
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

    def synchronize_batch_norm(self, model: nn.Module) -> nn.Module:
        """Return the model with batch norm statistics over all workers."""
        return model

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


def convert_batch_norm(model: nn.Module, peers: Peers) -> nn.Module:
    """Replace each batch norm by a `GlobalBatchNorm` with the same parameters, buffers and names.

    nn.SyncBatchNorm does the same on GPUs, but does not support CPU tensors.
    """
    if isinstance(model, PLAIN):
        return _over_peers(model, peers)
    for name, child in model.named_children():
        converted = convert_batch_norm(child, peers)
        if converted is not child:
            setattr(model, name, converted)
    return model


def _over_peers(norm: _BatchNorm, peers: Peers) -> GlobalBatchNorm:
    converted = GlobalBatchNorm(
        norm.num_features, norm.eps, norm.momentum, affine=norm.affine, track_running_stats=norm.track_running_stats
    )
    converted.weight, converted.bias = norm.weight, norm.bias
    converted.running_mean, converted.running_var = norm.running_mean, norm.running_var
    converted.num_batches_tracked = norm.num_batches_tracked
    converted.training = norm.training
    converted.peers = peers
    return converted


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
