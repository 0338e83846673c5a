"""timm's models as `timm/NAME`, an optional extra.

timm is R. Wightman's collection, https://github.com/huggingface/pytorch-image-models.
"""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import nn

from lockstep.errors import ConfigError, first_line
from lockstep.nn.trial_forward import UnfitImageError, send_blank


def build(name: str, num_classes: int, in_channels: int, side: int) -> nn.Module:
    """One of timm's models with random weights.

    Raises:
        ConfigError: timm is not installed, does not know the name, or the model does not take images of this side.
    """
    try:
        import timm
    except ModuleNotFoundError:
        raise ConfigError(
            f"--arch timm/{name}: timm is not installed; add it with: pip install 'lockstep-torch[timm]'"
        ) from None
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=1)
        hint = f"did you mean timm/{near[0]}?" if near else "timm.list_models() lists them"
        raise ConfigError(f"--arch timm/{name}: timm {timm.__version__} has no such model; {hint}")
    try:
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--arch timm/{name}: timm cannot make it for {in_channels} channels and {num_classes} classes: "
            f"{first_line(error)}"
        ) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--arch timm/{name}: timm made a {type(model).__name__} of it, which is no torch.nn.Module")
    _try(name, model, num_classes, in_channels, side)
    return model


def _try(name: str, model: nn.Module, num_classes: int, in_channels: int, side: int) -> None:
    """Send one blank image through: what sizes a model takes, timm does not say reliably."""
    own = getattr(model, "default_cfg", {}).get("input_size", (0, 224, 224))[-1]
    advice = f"give it larger ones (a folder's with --image-size {own}) or choose another model"
    try:
        logits = send_blank(model, torch.zeros(1, in_channels, side, side))
    except UnfitImageError as error:
        raise ConfigError(
            f"--arch timm/{name} does not take images of {side} x {side} pixels ({error}); it is made for "
            f"{own} x {own}: {advice}"
        ) from None
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, num_classes):
        raise ConfigError(f"--arch timm/{name} gives no logits, one for each class; choose a classifier")
