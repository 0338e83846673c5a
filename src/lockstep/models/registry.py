"""The registry of models: a name to a network with the right number of classes and input channels.

Names that both the zoo for small images and torchvision know, such as resnet18, mean the zoo's form for images of up to
64 pixels a side and torchvision's above; `torchvision/NAME` always means torchvision's.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.references import resolve

if TYPE_CHECKING:
    from torch import nn

SMALL_SIDE = 64  # the zoo's networks are made for images of up to so many pixels


@dataclass(frozen=True)
class ModelEntry:
    """One row of `lockstep models`: `module` has a function `builder(num_classes, in_channels)`."""

    module: str
    builder: str
    about: str
    in_channels: int = 3


ZOO = {
    "digits-net": ModelEntry("digits_net", "build", "small convolutional net for 8 x 8 digits", in_channels=1),
    "mnist-net": ModelEntry("mnist_net", "build", "small convolutional net for 28 x 28 digits", in_channels=1),
    "cifar-small": ModelEntry("cifar_small", "build", "residual net for 32 x 32 images, sized for CPUs"),
    "resnet18": ModelEntry("resnet", "resnet18", "ResNet-18 for 32 x 32 images"),
}


def torchvision_names() -> list[str]:
    """Every classification model of torchvision."""
    from torchvision import models

    return models.list_models(module=models)  # type: ignore[no-any-return]


def build(arch: str, num_classes: int, in_channels: int, side: int) -> nn.Module:
    """Build a model by name, with random weights.

    Args:
        arch: A name of the zoo, of torchvision, `torchvision/NAME`, or MODULE:FUNCTION, which is called with
            `num_classes`.
        num_classes: Length of the logits.
        in_channels: 1 for grey images, 3 for colour.
        side: The images' shorter side in pixels, which decides between two forms of one name.

    Raises:
        ConfigError: The name is unknown (the message names the nearest), or the model cannot take such images.
    """
    if ":" in arch:
        return _check(arch, resolve("--model", arch)(num_classes=num_classes))
    if arch in ZOO and (side <= SMALL_SIDE or arch not in torchvision_names()):
        entry = ZOO[arch]
        builder = getattr(import_module(f"lockstep.models.{entry.module}"), entry.builder)
        return _check(arch, builder(num_classes=num_classes, in_channels=in_channels))
    return _build_torchvision(arch.removeprefix("torchvision/"), num_classes, in_channels)


def _build_torchvision(name: str, num_classes: int, in_channels: int) -> nn.Module:
    from torchvision import models

    known = torchvision_names()
    if name not in known:
        near = get_close_matches(name, [*ZOO, *known], n=1)
        hint = f"did you mean {near[0]}?" if near else "`lockstep models` lists them"
        raise ConfigError(f"--arch {name}: there is no such model; {hint}")
    if in_channels != 3:
        raise ConfigError(
            f"--arch {name}: torchvision's models take colour images, these have {in_channels} channel; "
            f"choose one of {', '.join(ZOO)}"
        )
    # These two give auxiliary outputs in training unless told not to; no weights are loaded, so init_weights is ours.
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return _check(name, models.get_model(name, weights=None, num_classes=num_classes, **extra))


def _check(arch: str, model: object) -> nn.Module:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {arch} must return a torch.nn.Module; it returned {type(model).__name__}")
    return model
