"""The zoo: what it costs, that it reads the checkpoint files people have, and that it trains in every way we offer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.models import registry
from lockstep.models.registry import ZOO

PUBLISHED = {
    "vgg16": (14_728_266, 92.64),
    "resnet18": (11_173_962, 93.02),
    "resnet50": (23_520_842, 93.62),
    "resnet101": (42_512_970, 93.75),
    "regnetx_200mf": (2_321_946, 94.24),
    "regnety_400mf": (5_714_362, 94.29),
    "mobilenetv2": (2_296_922, 94.43),
    "resnext29_32x4d": (4_774_218, 94.73),
    "resnext29_2x64d": (9_128_778, 94.82),
    "simpledla": (15_142_970, 94.89),
    "densenet121": (6_956_298, 95.04),
    "preactresnet18": (11_171_146, 95.11),
    "dpn92": (34_236_634, 95.16),
    "dla": (16_291_386, 95.47),
}
# Of pytorch-cifar's checkpoint files for CIFAR-10: the number of entries, and the shapes of some.
LAYOUT: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "vgg16": (
        93,
        {
            "features.0.weight": (64, 3, 3, 3),
            "features.0.bias": (64,),
            "features.1.running_mean": (64,),
            "features.3.weight": (64, 64, 3, 3),
            "features.7.weight": (128, 64, 3, 3),
            "features.14.weight": (256, 128, 3, 3),
            "features.24.weight": (512, 256, 3, 3),
            "features.40.weight": (512, 512, 3, 3),
            "features.41.num_batches_tracked": (),
            "classifier.weight": (10, 512),
        },
    ),
    "resnet18": (
        122,
        {
            "conv1.weight": (64, 3, 3, 3),
            "bn1.weight": (64,),
            "layer1.0.conv1.weight": (64, 64, 3, 3),
            "layer2.0.shortcut.0.weight": (128, 64, 1, 1),
            "layer2.0.shortcut.1.running_var": (128,),
            "layer4.1.bn2.bias": (512,),
            "linear.weight": (10, 512),
        },
    ),
    "resnet50": (
        320,
        {
            "layer1.0.conv3.weight": (256, 64, 1, 1),
            "layer1.0.shortcut.0.weight": (256, 64, 1, 1),
            "layer2.0.conv2.weight": (128, 128, 3, 3),
            "layer3.5.conv1.weight": (256, 1024, 1, 1),
            "linear.weight": (10, 2048),
        },
    ),
    "resnet101": (626, {"layer3.22.conv1.weight": (256, 1024, 1, 1), "layer4.2.bn3.weight": (2048,)}),
    "regnetx_200mf": (
        266,
        {
            "conv1.weight": (64, 3, 3, 3),
            "layer1.0.conv2.weight": (24, 8, 3, 3),
            "layer1.0.shortcut.0.weight": (24, 64, 1, 1),
            "layer3.3.conv3.weight": (152, 152, 1, 1),
            "layer4.6.bn3.weight": (368,),
            "linear.weight": (10, 368),
        },
    ),
    "regnety_400mf": (
        516,
        {
            "layer1.0.se.se1.weight": (16, 32, 1, 1),
            "layer2.0.se.se1.weight": (8, 64, 1, 1),
            "layer2.0.se.se2.bias": (64,),
            "layer4.11.conv2.weight": (384, 16, 3, 3),
        },
    ),
    "mobilenetv2": (
        344,
        {
            "conv1.weight": (32, 3, 3, 3),
            "layers.0.conv2.weight": (32, 1, 3, 3),
            "layers.0.shortcut.0.weight": (16, 32, 1, 1),
            "layers.1.conv1.weight": (96, 16, 1, 1),
            "layers.16.conv3.weight": (320, 960, 1, 1),
            "conv2.weight": (1280, 320, 1, 1),
            "bn2.weight": (1280,),
            "linear.weight": (10, 1280),
        },
    ),
    "resnext29_32x4d": (
        188,
        {
            "conv1.weight": (64, 3, 1, 1),
            "layer1.0.conv2.weight": (128, 4, 3, 3),
            "layer3.2.conv3.weight": (1024, 512, 1, 1),
            "linear.weight": (10, 1024),
        },
    ),
    "resnext29_2x64d": (
        188,
        {"layer1.0.conv2.weight": (128, 64, 3, 3), "layer3.0.shortcut.0.weight": (1024, 512, 1, 1)},
    ),
    "simpledla": (
        236,
        {
            "base.0.weight": (16, 3, 3, 3),
            "layer2.1.bias": (32,),
            "layer3.root.conv.weight": (64, 128, 1, 1),
            "layer3.left_tree.shortcut.0.weight": (64, 32, 1, 1),
            "layer4.right_tree.right_tree.conv2.weight": (128, 128, 3, 3),
            "layer5.left_tree.root.bn.running_mean": (256,),
            "linear.weight": (10, 512),
        },
    ),
    "dla": (
        260,
        {
            "base.1.weight": (16,),
            "layer3.left_node.conv1.weight": (64, 32, 3, 3),
            "layer4.root.conv.weight": (128, 512, 1, 1),
            "layer4.level_1.root.conv.weight": (128, 256, 1, 1),
            "layer4.level_1.left_node.shortcut.0.weight": (128, 64, 1, 1),
            "layer5.prev_root.conv1.weight": (256, 128, 3, 3),
            "layer5.left_node.conv1.weight": (256, 256, 3, 3),
            "layer6.right_node.bn2.weight": (512,),
        },
    ),
    "densenet121": (
        722,
        {
            "conv1.weight": (64, 3, 3, 3),
            "dense1.0.bn1.weight": (64,),
            "dense1.5.conv1.weight": (128, 224, 1, 1),
            "dense1.5.conv2.weight": (32, 128, 3, 3),
            "trans1.bn.weight": (256,),
            "trans3.conv.weight": (512, 1024, 1, 1),
            "bn.bias": (1024,),
            "linear.weight": (10, 1024),
        },
    ),
    "preactresnet18": (
        102,
        {
            "conv1.weight": (64, 3, 3, 3),
            "layer1.0.bn1.weight": (64,),
            "layer2.0.shortcut.0.weight": (128, 64, 1, 1),
            "layer4.1.conv2.weight": (512, 512, 3, 3),
        },
    ),
    "dpn92": (
        572,
        {
            "bn1.weight": (64,),
            "layer1.0.conv2.weight": (96, 3, 3, 3),
            "layer1.0.conv3.weight": (272, 96, 1, 1),
            "layer1.0.shortcut.0.weight": (272, 64, 1, 1),
            "layer1.1.conv1.weight": (96, 288, 1, 1),
            "layer3.19.conv1.weight": (384, 1504, 1, 1),
            "layer4.2.bn3.weight": (2176,),
            "linear.weight": (10, 2560),
        },
    ),
}

SMALL = ["digits-net", "mnist-net", "cifar-small", "cifar10-fast", "resnet18"]


def _on_meta(name: str) -> nn.Module:
    entry = ZOO[name]
    with torch.device("meta"):
        return registry.build(name, 10, entry.in_channels, entry.side)


def _images(name: str, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, ZOO[name].in_channels, ZOO[name].side, ZOO[name].side, generator=generator)


def _train_once(name: str, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """A step's forward and backward pass; every gradient must be there and finite. Returns the logits."""
    logits = model(images)
    F.cross_entropy(logits.float(), torch.arange(len(images)) % 10).backward()
    assert logits.shape == (len(images), 10)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
    assert torch.isfinite(logits).all()
    return logits.detach()


def _fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    return registry.build(name, 10, ZOO[name].in_channels, ZOO[name].side)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_quoted_accuracy_are_the_published_ones(name: str) -> None:
    assert (ZOO[name].parameters, ZOO[name].quoted) == PUBLISHED[name]
    assert ZOO[name].paper


@pytest.mark.parametrize("name", ZOO)
def test_the_registry_counts_right(name: str) -> None:
    model = _on_meta(name).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == ZOO[name].parameters
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(_images(name, 1).to("meta"))
    assert counter.get_total_flops() == 2 * ZOO[name].multiply_adds


@pytest.mark.parametrize("name", LAYOUT)
def test_weights_have_names_and_shapes_of_existing_checkpoints(name: str) -> None:
    entries, shapes = LAYOUT[name]
    state = _on_meta(name).state_dict()
    assert len(state) == entries
    assert {key: tuple(state[key].shape) for key in shapes} == shapes


def test_all_published_models_have_a_layout() -> None:
    assert set(LAYOUT) == set(PUBLISHED) == {name for name, entry in ZOO.items() if entry.quoted}


def test_groups_of_a_convolution_start_as_large_as_whole_ones() -> None:
    torch.manual_seed(0)
    blocks = dict(registry.build("mobilenetv2", 10, 3, 32).named_modules())
    depthwise, pointwise = (blocks[f"layers.16.{name}"].get_parameter("weight") for name in ("conv2", "conv3"))
    assert depthwise.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.05)
    assert pointwise.std().item() == pytest.approx((2 / 320) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains_in_float32_bf16_and_channels_last(name: str) -> None:
    images = _images(name)
    model = _fresh(name)
    plain = _train_once(name, model, images)
    with torch.autocast("cpu", torch.bfloat16):
        assert _train_once(name, model, images).dtype == torch.bfloat16
    last = _fresh(name).to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        _train_once(name, last, images.to(memory_format=torch.channels_last)), plain, atol=2e-3, rtol=2e-3
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains_in_half_precision(name: str) -> None:
    _train_once(name, _fresh(name).half(), _images(name).half())


def _check_compiled(name: str) -> None:
    """Whole graphs, without a break; the first layers' gradient is the plain model's."""
    torch._dynamo.reset()
    images = _images(name)
    plain = _train_once(name, _fresh(name), images)
    compiled = torch.compile(_fresh(name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_train_once(name, compiled, images), plain, atol=1e-4, rtol=1e-4)


def _check_exported(name: str) -> None:
    """torch.export takes the model with any number of images."""
    model = _fresh(name).eval()
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(model, (_images(name, 2),), dynamic_shapes=({0: batch},))
    images = _images(name, 3)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), model(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_small_models_compile_and_export_whole(name: str) -> None:
    _check_compiled(name)
    _check_exported(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ZOO if name not in SMALL])
def test_the_other_models_compile_and_export_whole(name: str) -> None:
    _check_compiled(name)
    _check_exported(name)
