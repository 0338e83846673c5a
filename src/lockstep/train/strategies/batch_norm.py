"""Replace a model's batch norms by ones with statistics over the samples of all workers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError
from lockstep.models.global_batch_norm import GlobalBatchNorm, Peers

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
