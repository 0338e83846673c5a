"""The zoo: what it costs, that it reads the checkpoint files people have, and that it trains in every way we offer."""

from __future__ import annotations

from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.models import registry
from lockstep.models.registry import ZOO

# The number of entries of pytorch-cifar's checkpoint files for CIFAR-10, and the CRC-32 of our names and shapes, which
# were compared with excerpts of these files.
LAYOUT = {
    "vgg16": (93, 0xE2022320),
    "resnet18": (122, 0x36CB5110),
    "resnet50": (320, 0x837F51AF),
    "resnet101": (626, 0x7197DFA4),
    "regnetx_200mf": (266, 0xAB6CC620),
    "regnety_400mf": (516, 0xB9CC30E5),
    "mobilenetv2": (344, 0x565F4D35),
    "resnext29_32x4d": (188, 0xCC670EB2),
    "resnext29_2x64d": (188, 0xFF49946A),
    "simpledla": (236, 0x7B953377),
    "dla": (260, 0xFDAF3B76),
    "densenet121": (722, 0x40BAFB5E),
    "preactresnet18": (102, 0x3C963536),
    "dpn92": (572, 0x7C913AA1),
}

COMPILED = ["digits-net", "resnet18"]


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


@pytest.mark.parametrize("name", ZOO)
def test_the_registry_counts_right(name: str) -> None:
    model = _on_meta(name).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == ZOO[name].parameters
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(_images(name, 1).to("meta"))
    assert counter.get_total_flops() == 2 * ZOO[name].multiply_adds


@pytest.mark.parametrize("name", LAYOUT)
def test_weights_have_names_and_shapes_of_existing_checkpoints(name: str) -> None:
    lines = sorted(f"{key} {list(tensor.shape)}" for key, tensor in _on_meta(name).state_dict().items())
    assert (len(lines), crc32("\n".join(lines).encode())) == LAYOUT[name], "\n".join(lines)


def test_all_published_models_have_a_layout_and_a_paper() -> None:
    assert set(LAYOUT) == {name for name, entry in ZOO.items() if entry.quoted}
    assert all(ZOO[name].paper for name in LAYOUT)


def test_groups_of_a_convolution_start_as_large_as_whole_ones() -> None:
    torch.manual_seed(0)
    blocks = dict(registry.build("mobilenetv2", 10, 3, 32).named_modules())
    depthwise, pointwise = (blocks[f"layers.16.{name}"].get_parameter("weight") for name in ("conv2", "conv3"))
    assert depthwise.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.05)
    assert pointwise.std().item() == pytest.approx((2 / 320) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in ("resnet101", "dpn92"))) for name in ZOO]
)
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


@pytest.mark.parametrize("name", COMPILED)
def test_small_models_compile_and_export_whole(name: str) -> None:
    _check_compiled(name)
    _check_exported(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ZOO if name not in COMPILED])
def test_the_other_models_compile_and_export_whole(name: str) -> None:
    _check_compiled(name)
    _check_exported(name)
