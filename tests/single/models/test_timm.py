"""timm's models by name."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from lockstep.cli.parse import parse_train
from lockstep.data.catalog import load
from lockstep.errors import ConfigError
from lockstep.models import registry
from lockstep.train.inference import LoadedNetwork, evaluate_network
from lockstep.train.network import build_model
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


@pytest.fixture
def timm() -> ModuleType:
    module: ModuleType = pytest.importorskip("timm")
    return module


def test_it_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'lockstep-torch\[timm\]'"):
        registry.build("timm/resnet18", 10, 3, 32)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("channels", [1, 3])
def test_model_takes_gray_and_color_images_and_gives_all_logits(channels: int) -> None:
    model = registry.build("timm/test_resnet", num_classes=7, in_channels=channels, side=64)
    assert model.training
    assert model(torch.zeros(2, channels, 64, 64)).shape == (2, 7)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("resnet1888", r"--arch timm/resnet1888: unknown model in timm .*; did you mean timm/resnet18"),
        ("???", r"see timm\.list_models\(\)"),
    ],
)
def test_unknown_names_are_explained(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        registry.build(f"timm/{name}", 10, 3, 32)


@pytest.mark.usefixtures("timm")
def test_images_of_another_size_are_refused_with_the_right_one() -> None:
    config = parse_train(["digits", "-a", "timm/vit_tiny_patch16_224"]).job
    data = load(config.data)
    message = r"--arch timm/vit_tiny_patch16_224 cannot take images of shape \[1, 8, 8\].*made for 224 x 224; .*--image"
    with pytest.raises(ConfigError, match=message):
        build_model(config, data)
    network = LoadedNetwork(registry.build(config.model.arch, 10, 1, 8), data.classes, data.input, "digits")
    with pytest.raises(ConfigError, match="the network cannot take images of shape"):
        evaluate_network(config, World(RankInfo(), torch.device("cpu")), network, data)
