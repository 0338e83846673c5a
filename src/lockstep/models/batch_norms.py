"""The conversion of a model's batch norms to ones that compute over the samples of all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from traceback import walk_stack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lockstep.errors import ConfigError
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.models.trial_forward import user_frame

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
