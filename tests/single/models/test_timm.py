"""timm's models by name."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.models import registry


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
    ("name", "channels", "side", "complaint"),
    [
        ("resnet1888", 3, 32, r"--arch timm/resnet1888: unknown model in timm .*; did you mean timm/resnet18"),
        ("???", 3, 32, r"see timm\.list_models\(\)"),
        ("vit_tiny_patch16_224", 3, 32, r"does not accept images of 32 x 32 pixels .*224 x 224; .*--image-size 224"),
    ],
)
def test_what_does_not_fit_is_explained(name: str, channels: int, side: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        registry.build(f"timm/{name}", 10, channels, side)


@pytest.mark.usefixtures("timm")
def test_trying_a_model_keeps_statistics_and_random_state() -> None:
    torch.manual_seed(0)
    model = registry.build("timm/test_resnet", 10, 3, 32)
    after = torch.rand(3)
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model("test_resnet", num_classes=10)
    assert torch.equal(after, torch.rand(3))
    for (name, one), (_, other) in zip(model.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
