"""The model registry: builds networks by name, for a number of classes and input channels.

Some names, such as resnet18, are both in the zoo of networks for small images and in torchvision. They select the zoo's
version for images of up to 64 pixels a side, and torchvision's for larger ones. `torchvision/NAME` always selects
torchvision's model, and `timm/NAME` timm's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from lockstep.config.values import resolve
from lockstep.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

SMALL_SIDE = 64  # pixels; the zoo's networks are for images up to this size
TIMM = "timm/"


@dataclass(frozen=True)
class ModelEntry:
    """A model of the zoo, one row of `lockstep models`.

    The counts are constants, so that listing models does not import torch; a test checks them.

    Attributes:
        module: The module in this package. Its function (num_classes, in_channels) builds the network; its name is the
            model's, with "_" for "-".
        about: A short description.
        parameters: The number of parameters with 10 classes.
        multiply_adds: The multiply-adds of convolutions and linear layers for one image.
        quoted: Top-1 accuracy on CIFAR-10 in percent, as published by pytorch-cifar; not measured by Lockstep.
        paper: The arXiv number of the paper.
        in_channels: The channels of the images it is designed for.
        side: The size of the images it is designed for, in pixels.
        calibrate: The module's function (model, images) that computes weights from images before training.
    """

    module: str
    about: str
    parameters: int
    multiply_adds: int
    quoted: float | None = None
    paper: str = ""
    in_channels: int = 3
    side: int = 32
    calibrate: str | None = None


ZOO = {
    "digits-net": ModelEntry("zoo_small", "for 8 x 8 digits", 113_386, 2_398_208, in_channels=1, side=8),
    "mnist-net": ModelEntry("zoo_small", "for 28 x 28 digits", 66_426, 3_696_832, in_channels=1, side=28),
    "cifar-small": ModelEntry("zoo_small", "sized for CPUs", 354_058, 21_038_336),
    "cifar10-fast": ModelEntry("zoo_small", "few epochs on one GPU", 1_971_640, 118_147_360, calibrate="whiten"),
    "vgg16": ModelEntry("zoo_small", "no shortcuts", 14_728_266, 313_201_664, 92.64, "1409.1556"),
    "resnet18": ModelEntry("zoo_large", "residual blocks", 11_173_962, 555_422_720, 93.02, "1512.03385"),
    "resnet50": ModelEntry("zoo_large", "16 bottlenecks", 23_520_842, 1_297_829_888, 93.62, "1512.03385"),
    "resnet101": ModelEntry("zoo_large", "33 bottlenecks", 42_512_970, 2_509_983_744, 93.75, "1512.03385"),
    "regnetx_200mf": ModelEntry("zoo_large", "grouped bottlenecks", 2_321_946, 223_317_600, 94.24, "2003.13678"),
    "regnety_400mf": ModelEntry("zoo_large", "with channel attention", 5_714_362, 467_089_152, 94.29, "2003.13678"),
    "mobilenetv2": ModelEntry("zoo_small", "depth-wise, for phones", 2_296_922, 91_154_944, 94.43, "1801.04381"),
    "resnext29_32x4d": ModelEntry("zoo_large", "bottlenecks, 32 groups", 4_774_218, 772_483_072, 94.73, "1611.05431"),
    "resnext29_2x64d": ModelEntry("zoo_large", "bottlenecks, 2 groups", 9_128_778, 1_409_492_992, 94.82, "1611.05431"),
    "simpledla": ModelEntry("zoo_large", "binary trees of blocks", 15_142_970, 913_495_040, 94.89, "1707.06484"),
    "densenet121": ModelEntry("zoo_large", "each layer sees all", 6_956_298, 888_350_720, 95.04, "1608.06993"),
    "preactresnet18": ModelEntry("zoo_large", "residual, norm first", 11_171_146, 555_422_720, 95.11, "1603.05027"),
    "dpn92": ModelEntry("zoo_large", "residual and dense", 34_236_634, 2_042_422_272, 95.16, "1707.01629"),
    "dla": ModelEntry("zoo_large", "trees of blocks", 16_291_386, 1_030_935_552, 95.47, "1707.06484"),
}


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classification models."""
    from torchvision import models

    return models.list_models(module=models)  # type: ignore[no-any-return]


def build(arch: str, num_classes: int, in_channels: int, side: int) -> nn.Module:
    """Build a model by name, with random weights.

    Args:
        arch: A name of the zoo or of torchvision, `torchvision/NAME`, `timm/NAME`, or MODULE:FUNCTION, which is called
            with `num_classes`.
        num_classes: The number of logits.
        in_channels: 1 for grayscale images, 3 for color.
        side: The shorter side of the images in pixels; decides between the two versions of a name.

    Raises:
        ConfigError: The name is unknown (the message suggests a similar one), or the model cannot have these classes or
            channels.
    """
    if ":" in arch:
        return _check(arch, _call(arch, resolve("--model", arch), num_classes))
    if arch.startswith(TIMM):
        return _build_timm(arch.removeprefix(TIMM), num_classes, in_channels)
    entry = _entry(arch, side)
    if entry is not None:
        return _check(arch, _function(entry, arch.replace("-", "_"))(num_classes=num_classes, in_channels=in_channels))
    return _build_torchvision(arch.removeprefix("torchvision/"), num_classes, in_channels)


def calibration(arch: str, side: int) -> Callable[[nn.Module, torch.Tensor], None] | None:
    """Return the model's calibration function (model, images [N, C, H, W], floating-point); None for most models."""
    entry = _entry(arch, side)
    return _function(entry, entry.calibrate) if entry is not None and entry.calibrate else None


def _entry(arch: str, side: int) -> ModelEntry | None:
    """Return the zoo's entry for a name and an image size; None if the name selects another library's model."""
    if arch in ZOO and (side <= SMALL_SIDE or arch not in torchvision_names()):
        return ZOO[arch]
    return None


def _function(entry: ModelEntry, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"lockstep.models.{entry.module}"), name)
    return function


def _build_torchvision(name: str, num_classes: int, in_channels: int) -> nn.Module:
    from torchvision import models

    known = torchvision_names()
    if name not in known:
        near = get_close_matches(name, [*ZOO, *known], n=1)
        hint = f"did you mean {near[0]}?" if near else "to list models, run `lockstep models`"
        module, _, function = name.rpartition(".")
        if module and not near:
            hint = f"for a custom function, use --model {module}:{function}"
        raise ConfigError(f"--arch {name}: unknown model; {hint}")
    if in_channels != 3:
        raise ConfigError(
            f"--arch {name}: torchvision's models need color images, but these have {in_channels} channel; "
            f"choose one of {', '.join(ZOO)}"
        )
    # These two have auxiliary outputs by default, and warn unless init_weights is set.
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    return _check(name, models.get_model(name, weights=None, num_classes=num_classes, **extra))


def _build_timm(name: str, num_classes: int, in_channels: int) -> nn.Module:
    """Build one of timm's models (https://github.com/huggingface/pytorch-image-models), from the extra `timm`.

    Raises:
        ConfigError: timm is not installed, the name is unknown, or the model cannot have these classes or channels.
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
    return _check(name, model)


def _call(reference: str, function: Callable[..., Any], num_classes: int) -> Any:
    try:
        signature(function).bind(num_classes=num_classes)
    except TypeError as error:
        raise ConfigError(
            f"--model {reference}: cannot be called with num_classes={num_classes} ({error}); "
            f"define it as {getattr(function, '__name__', 'build')}(num_classes)"
        ) from None
    except ValueError:
        pass  # a builtin has no signature
    return function(num_classes=num_classes)


def _check(arch: str, model: object) -> nn.Module:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {arch}: must return a torch.nn.Module, returned {type(model).__name__}")
    return model
