"""timm's models as `timm/NAME`; needs the optional extra `timm`.

timm is R. Wightman's collection, https://github.com/huggingface/pytorch-image-models.
"""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import nn

from lockstep.errors import ConfigError, first_line
from lockstep.models.trial_forward import UnfitImageError, send_blank


def build(name: str, num_classes: int, in_channels: int, side: int) -> nn.Module:
    """Build one of timm's models, with random weights.

    Raises:
        ConfigError: timm is not installed, the name is unknown, or the model does not accept images of this size.
    """
    try:
        import timm
    except ModuleNotFoundError:
        raise ConfigError(
            f"--arch timm/{name}: timm is not installed; run: pip install 'lockstep-torch[timm]'"
        ) from None
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=1)
        hint = f"did you mean timm/{near[0]}?" if near else "see timm.list_models()"
        raise ConfigError(f"--arch timm/{name}: unknown model in timm {timm.__version__}; {hint}")
    try:
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--arch timm/{name}: timm cannot build it for {in_channels} channels and {num_classes} classes: "
            f"{first_line(error)}"
        ) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--arch timm/{name}: timm returned {type(model).__name__}, not a torch.nn.Module")
    _try(name, model, num_classes, in_channels, side)
    return model


def _try(name: str, model: nn.Module, num_classes: int, in_channels: int, side: int) -> None:
    """Run one blank image through the model, since timm's metadata on image sizes is not reliable."""
    own = getattr(model, "default_cfg", {}).get("input_size", (0, 224, 224))[-1]
    advice = f"use larger images (for a folder: --image-size {own}) or choose another model"
    try:
        logits = send_blank(model, torch.zeros(1, in_channels, side, side, device="cpu"))
    except UnfitImageError as error:
        raise ConfigError(
            f"--arch timm/{name} does not accept images of {side} x {side} pixels ({error}); "
            f"it is made for {own} x {own}; {advice}"
        ) from None
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, num_classes):
        raise ConfigError(f"--arch timm/{name} does not return one logit per class; choose a classifier")
