"""Every model by its name, built without memory on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18
from torchvision.models.regnet import BlockParams

from lockstep.errors import ConfigError
from lockstep.models import registry
from lockstep.models.pretrained import last_layer
from lockstep.models.registry import ZOO

TORCHVISION = registry.torchvision_names()
# One of each family is run as well; all of them would take half a minute.
RUN = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vit_b_16", "wide_resnet50_2",
]  # fmt: skip
SIDES = {"inception_v3": 299}


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules made here have shapes but no memory; RegNet's arithmetic with small tensors stays on the CPU."""
    blocks = BlockParams.from_init_params.__func__  # type: ignore[attr-defined]

    def from_init_params(cls: Any, *arguments: Any, **options: Any) -> Any:
        with torch.device("cpu"):
            return blocks(cls, *arguments, **options)

    monkeypatch.setattr(BlockParams, "from_init_params", classmethod(from_init_params))
    with torch.device("meta"):
        yield


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("name", TORCHVISION)
def test_every_torchvision_model_has_the_right_number_of_classes(name: str) -> None:
    model = registry.build(f"torchvision/{name}", num_classes=7, in_channels=3, side=224)
    assert list(model.parameters())[-1].shape[0] == 7
    last = model.get_submodule(last_layer(model))  # which --pretrained leaves random
    assert 7 in (getattr(last, "out_features", None), getattr(last, "out_channels", None))
    if name in RUN:
        side = SIDES.get(name, 224)
        logits = model(torch.empty(2, 3, side, side))
        assert logits.shape == (2, 7)


def test_the_models_that_are_run_are_torchvisions() -> None:
    assert set(RUN) <= set(TORCHVISION)


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_gives_a_logit_per_class(name: str, channels: int) -> None:
    side = ZOO[name].side
    model = registry.build(name, num_classes=7, in_channels=channels, side=side)
    assert model(torch.empty(2, channels, side, side)).shape == (2, 7)


def test_resnet18_is_the_small_form_up_to_64_pixels() -> None:
    with torch.device("meta"):
        forms = {side: registry.build("resnet18", 10, 3, side) for side in (32, 64, 65, 224)}
        always = registry.build("torchvision/resnet18", 10, 3, 32)
        theirs = resnet18(num_classes=10)
    assert [_parameters(forms[side]) for side in (32, 64)] == [11_173_962] * 2
    for model in (forms[65], forms[224], always):
        assert [(name, p.shape) for name, p in model.named_parameters()] == [
            (name, p.shape) for name, p in theirs.named_parameters()
        ]


def test_a_seed_decides_the_weights() -> None:
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(torch.cat([p.detach().flatten() for p in registry.build("digits-net", 10, 1, 8).parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("arch", "hint"),
    [
        ("resnext29_32", "did you mean resnext29_32x4d?"),
        ("digit-net", "did you mean digits-net?"),
        ("torchvision/resnet500", "did you mean resnet50?"),
        ("efficientnet-b0", "did you mean efficientnet_b0?"),
        ("???", "to list models, run `lockstep models`"),
    ],
)
def test_an_unknown_name_names_the_nearest(arch: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build(arch, 10, 3, 32)
    assert "--arch" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("arch", ["resnet34", "torchvision/resnet18"])
def test_torchvisions_models_refuse_gray_images(arch: str) -> None:
    with pytest.raises(ConfigError, match=r"color images.*1 channel.*digits-net"):
        registry.build(arch, 10, 1, 28)


@pytest.fixture
def my_nets(new_module: Callable[[str, str], None]) -> str:
    """The name of a module of the user's own with functions that build networks."""
    new_module(
        "lockstep_test_my_nets",
        "from torch import nn\n"
        "def build(num_classes): return nn.Linear(3, num_classes)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes, width=4): super().__init__(width, num_classes)\n"
        "def nothing(num_classes): return num_classes\n"
        "def fixed(): return nn.Linear(3, 10)\n",
    )
    return "lockstep_test_my_nets"


def test_the_users_function_is_called_with_the_number_of_classes(my_nets: str) -> None:
    for name, width in (("build", 3), ("Net", 4)):
        model = registry.build(f"{my_nets}:{name}", num_classes=7, in_channels=1, side=28)
        assert model.weight.shape == (7, width)


def test_a_function_that_builds_no_network_is_named(my_nets: str) -> None:
    with pytest.raises(ConfigError, match=f"--model {my_nets}:nothing: must return a torch.nn.Module.*int"):
        registry.build(f"{my_nets}:nothing", 10, 3, 32)
    with pytest.raises(ConfigError, match=f"--model {my_nets}:missing"):
        registry.build(f"{my_nets}:missing", 10, 3, 32)
    with pytest.raises(ConfigError, match=r"cannot be called with num_classes=10 .*define it as fixed\(num_classes"):
        registry.build(f"{my_nets}:fixed", 10, 3, 32)
    with pytest.raises(ConfigError, match=f"--model {my_nets}:build"):
        registry.build(f"{my_nets}.build", 10, 3, 32)
