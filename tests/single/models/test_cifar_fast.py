"""cifar10-fast: the whitened first layer, and who computes it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lockstep.config import recipes
from lockstep.config.schema import ModelConfig, TrainConfig
from lockstep.data.sets import ImageData, InputSpec, MemorySplit, UserSplit
from lockstep.errors import ConfigError
from lockstep.models import registry, zoo_small
from lockstep.train.network import SAMPLES, build_model

SPEC = InputSpec(3, 32, 32, (0.5, 0.4, 0.3), (0.25, 0.25, 0.25))


def _smooth_images(count: int) -> torch.Tensor:
    """Pixels that resemble their neighbors, as photographs' do: uint8 [N, 3, 32, 32]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    fine = torch.rand(count, 3, 32, 32, generator=generator)
    return (255 * (0.9 * F.interpolate(coarse, scale_factor=4, mode="bilinear") + 0.1 * fine)).to(torch.uint8)


def _data(images: torch.Tensor) -> ImageData:
    split = MemorySplit(images, torch.zeros(len(images), dtype=torch.int64))
    return ImageData("smooth", ("a", "b"), split, split, SPEC)


CONFIG = TrainConfig(model=ModelConfig(arch="cifar10-fast"))


def test_the_first_layer_gives_uncorrelated_channels_of_one_size() -> None:
    model = build_model(CONFIG, _data(_smooth_images(300)))
    images = (_smooth_images(300) / 255 - torch.tensor(SPEC.mean).view(3, 1, 1)) / 0.25
    with torch.no_grad():
        out = F.conv2d(images, model.get_submodule("whiten").get_parameter("weight"))
    positive, negative = out.transpose(0, 1).flatten(1).split(12)
    torch.testing.assert_close(negative, -positive)
    covariance = positive @ positive.T / positive.shape[1]
    sizes = covariance.diagonal()
    assert ((sizes > 0.5) & (sizes < 1.001)).all()  # a little below 1 where MIN_VARIANCE counts
    assert (covariance - torch.diag(sizes)).abs().max() < 1e-3


def test_every_worker_computes_the_same_and_it_is_not_trained() -> None:
    data = _data(_smooth_images(50))
    first, second = (build_model(CONFIG, data) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    frozen = [name for name, parameter in first.named_parameters() if not parameter.requires_grad]
    assert frozen == ["whiten.weight"]


def test_images_are_taken_from_all_over_the_set() -> None:
    images = _smooth_images(SAMPLES).repeat_interleave(2, 0)[1:]
    images[1::2] = 0  # every other one is not used
    one, other = (build_model(CONFIG, _data(each)).get_submodule("whiten") for each in (images, images[::2]))
    assert torch.equal(one.get_parameter("weight"), other.get_parameter("weight"))


def test_images_outside_memory_are_refused_with_a_fix() -> None:
    data = replace(_data(_smooth_images(2)), train=UserSplit([]))
    with pytest.raises(ConfigError, match=r"--arch cifar10-fast .*in memory.*--in-memory always"):
        build_model(CONFIG, data)


def test_large_images_calibrate_too_and_other_models_do_not() -> None:
    assert registry.calibration("cifar10-fast", 96) is not None
    assert registry.calibration("resnet18", 32) is None
    assert registry.calibration("timm/resnet18", 32) is None
    assert registry.calibration("mine:build", 32) is None


def test_convolutions_start_as_the_identity() -> None:
    model = zoo_small.cifar10_fast(10, 3, (32, 48, 48))
    layer = model.get_submodule("block2.0")
    images = torch.randn(1, 32, 5, 5)
    torch.testing.assert_close(layer(images)[:, :32], images)


def test_the_recipe_is_the_models() -> None:
    recipe = recipes.load("cifar10-fast")
    assert (recipe.model.arch, recipe.data.dataset) == ("cifar10-fast", "cifar10")
    assert recipe.augment.flip
    assert recipe.augment.flip_alternate
    assert not recipe.optim.decay_all


@pytest.mark.cold  # the compiler starts a Python where its cache is empty
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.long  # compiles for a quarter of a minute
def test_compiled_gradients_are_finite_in_bf16() -> None:
    """Compiled code keeps numbers unrounded that others read rounded, which made amax divide by zero."""
    model = zoo_small.cifar10_fast(10, widths=(8, 16, 16))
    compiled = torch.compile(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = compiled(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    F.cross_entropy(logits.float(), torch.arange(4)).backward()
    torch._dynamo.reset()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert model.get_parameter("linear.weight").grad is not None
