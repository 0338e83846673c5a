"""Putting batch norm over all workers' samples into a model, in place of batch norm over one worker's."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError
from lockstep.nn.global_batch_norm import GlobalBatchNorm, Peers

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_batch_norm(model: nn.Module) -> None:
    """Refuse a batch norm that does more than torch's, which a converted one would no longer do.

    Raises:
        ConfigError: There is one, such as timm's norms with an activation inside.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in (*PLAIN, nn.SyncBatchNorm, GlobalBatchNorm):
            raise ConfigError(
                f"--sync-bn cannot replace {type(module).__name__} (layer {name}), which does more than batch norm; "
                f"leave out --sync-bn, or choose a model with torch's BatchNorm"
            )


def has_other_buffers(model: nn.Module) -> bool:
    """Whether a module other than torch's batch norms and ours has buffers, which its forward pass may depend on."""
    known = (*PLAIN, nn.SyncBatchNorm, GlobalBatchNorm)
    return any(
        type(module) not in known and any(True for _ in module.buffers(recurse=False)) for module in model.modules()
    )


def convert_batch_norm(model: nn.Module, peers: Peers) -> nn.Module:
    """The model with each batch norm replaced by a `GlobalBatchNorm` of the same parameters, buffers and names.

    torch's own nn.SyncBatchNorm does this on GPUs, and refuses tensors on the CPU.
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
