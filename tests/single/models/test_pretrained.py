"""Starting from trained weights: torchvision's, from a cache made here, and files of any kind."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from attack import Attack
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from lockstep.errors import CheckpointError, ConfigError
from lockstep.models import pretrained, registry, saved_weights


def _random_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        key: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value.clone()
        for key, value in model.state_dict().items()
    }


def _same(model: nn.Module, weights: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[key], weights[key]) for key in state if key not in but)


def _net(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's cache of weights, empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "checkpoints"


def _publish(cache: Path, name: str, weights: dict[str, Any]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(weights, cache / Path(models.get_model_weights(name).DEFAULT.url).name)


@pytest.mark.parametrize(("name", "classes"), [("shufflenet_v2_x0_5", 1000), ("squeezenet1_1", 7), ("mnasnet0_5", 7)])
def test_published_weights_come_from_the_cache(cache: Path, name: str, classes: int) -> None:
    weights = _random_weights(models.get_model(name))
    _publish(cache, name, weights)
    for arch in (name, f"torchvision/{name}"):
        model = registry.build(arch, classes, 3, 224)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        said = pretrained.load_published(arch, model)
        assert "_Weights.IMAGENET1K_V1" in said
        last = ("classifier.1.weight", "classifier.1.bias")
        if classes == 1000:
            assert _same(model, weights)
            assert "stays random" not in said
        else:
            assert _same(model, weights, but=last)
            assert all(torch.equal(model.state_dict()[key], before[key]) for key in last)
            assert "except classifier.1, which stays random: the model has 7 classes, the file 1,000" in said


def test_old_names_and_auxiliary_classifiers_are_known(cache: Path) -> None:
    weights = _random_weights(models.get_model("googlenet", aux_logits=True, init_weights=False))
    assert any(key.startswith("aux1.") for key in weights)
    _publish(cache, "googlenet", weights)
    model = registry.build("googlenet", 1000, 3, 224)
    pretrained.load_published("googlenet", model)
    assert _same(model, weights)
    assert pretrained.modern_name("features.denseblock1.denselayer2.norm.1.weight") == (
        "features.denseblock1.denselayer2.norm1.weight"
    )
    assert pretrained.modern_name("features.denseblock1.denselayer2.conv1.weight") == (
        "features.denseblock1.denselayer2.conv1.weight"
    )


def test_modules_rename_what_older_files_have(tmp_path: Path) -> None:
    """Vision transformers' published weights call the MLP's layers linear_1 and linear_2."""
    options: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8}
    model = models.VisionTransformer(**options, mlp_dim=8, num_classes=3)
    weights = _random_weights(model)
    older = OrderedDict(
        (key.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"), value) for key, value in weights.items()
    )
    assert older.keys() != weights.keys()
    older._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    torch.save(older, tmp_path / "vit.pth")
    pretrained.load_own(tmp_path / "vit.pth", model)
    assert _same(model, weights)


def test_without_network_the_file_and_its_place_are_named(cache: Path) -> None:
    def fail(url: str, path: str, digest: str | None, progress: bool) -> None:
        assert digest == digest_of_url
        raise OSError("Name or service not known")

    url = models.get_model_weights("resnet18").DEFAULT.url
    digest_of_url = url.rpartition("-")[2].removesuffix(".pth")
    with pytest.raises(CheckpointError, match=r"cannot download .*Name or service not known") as caught:
        pretrained.load_published("resnet18", registry.build("torchvision/resnet18", 10, 3, 224), download=fail)
    assert url in str(caught.value)
    assert str(cache / Path(url).name) in str(caught.value)


def test_a_networks_own_form_has_no_published_weights() -> None:
    small = registry.build("resnet18", 10, 3, 32)
    with pytest.raises(ConfigError, match=r"no weights for resnet18 for small images; use --arch torchvision/resnet18"):
        pretrained.load_published("resnet18", small)
    with pytest.raises(ConfigError, match="no weights for digits-net"):
        pretrained.load_published("digits-net", registry.build("digits-net", 10, 1, 8))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("nested", [None, "state_dict", "net", "model"])
def test_files_of_torch_are_read_with_and_without_wrapping(tmp_path: Path, prefix: str, nested: str | None) -> None:
    weights = _random_weights(_net())
    named = OrderedDict((f"{prefix}{key}", value) for key, value in weights.items())
    content: Any = {nested: named, "epoch": 3, "best_acc1": torch.tensor(0.5)} if nested else named
    path = tmp_path / "mine.pth"
    torch.save(content, path)
    model = _net()
    assert pretrained.load_own(path, model) == f"starting from {path}"
    assert _same(model, weights)


class _Wrapping(nn.Module):
    """A network with a submodule of its own that has a wrapper's name."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.scale = nn.Linear(3, 2), nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(4))  # beside module.weight


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_a_submodule_of_the_networks_own_keeps_its_name(tmp_path: Path, prefix: str) -> None:
    weights = _random_weights(_Wrapping())
    torch.save({f"{prefix}{key}": value for key, value in weights.items()}, tmp_path / "mine.pth")
    model = _Wrapping()
    pretrained.load_own(tmp_path / "mine.pth", model)
    assert _same(model, weights)
    inner = nn.Sequential(OrderedDict(module=_net()))
    torch.save(inner.state_dict(), tmp_path / "inner.pth")
    model = nn.Sequential(OrderedDict(module=_net()))
    pretrained.load_own(tmp_path / "inner.pth", model)
    assert _same(model, inner.state_dict())


def test_safetensors_and_run_folders_are_read(tmp_path: Path) -> None:
    weights = _random_weights(_net())
    save_file(weights, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        model = _net()
        pretrained.load_own(path, model)
        assert _same(model, weights)


def test_other_number_of_classes_resets_only_the_last_layer(tmp_path: Path) -> None:
    weights = _random_weights(_net(classes=5))
    torch.save(weights, tmp_path / "mine.pth")
    model, before = _net(classes=3), _net(classes=3).state_dict()
    said = pretrained.load_own(tmp_path / "mine.pth", model)
    assert said.endswith("mine.pth, except 3, which stays random: the model has 3 classes, the file 5")
    last = ("3.weight", "3.bias")
    assert _same(model, weights, but=last)
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in last)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.weight": None}, "0.weight is missing"),
        ({"9.weight": torch.zeros(1)}, "9.weight is unknown"),
        ({"0.bias": torch.zeros(5)}, r"0.bias has shape \(5,\), expected \(4,\)"),
        ({"3.weight": torch.zeros(3, 17)}, r"3.weight has shape \(3, 17\), expected \(3, 16\)"),
        ({"0.bias": "four"}, "not tensors: 0.bias"),
    ],
)
def test_any_other_difference_is_an_error_that_names_the_tensors(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    weights = {key: value for key, value in {**_random_weights(_net()), **change}.items() if value is not None}
    torch.save(weights, tmp_path / "mine.pth")
    with pytest.raises(CheckpointError, match=words):
        pretrained.load_own(tmp_path / "mine.pth", _net())


def test_a_hostile_file_is_refused_named_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps({"x": Attack(os.system, "touch hacked")}))
    with pytest.raises(CheckpointError, match=r"evil\.pth(: not loaded.* it references .*system| cannot be read)"):
        pretrained.load_own(path, _net())
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("name", ["mine.pth", "mine.safetensors", "mine.bin"])
@pytest.mark.parametrize("content", [b"", b"not a file of weights", b"PK\x03\x04 broken"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        pretrained.load_own(path, _net())
    with pytest.raises(CheckpointError, match=r"there\.pth: file not found"):
        pretrained.load_own(tmp_path / "there.pth", _net())


@pytest.mark.timeout(20)
def test_a_long_name_of_what_a_file_wants_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hostile.pt"
    wanted = b"a:" * 200_000  # torch searches its own message for patterns, in the square of its length
    path.write_bytes(b"\x80\x02c" + wanted + b"\n" + wanted + b"\n.")
    with pytest.raises(CheckpointError, match="not loaded, and no code in it was run") as refusal:
        saved_weights.read(path)
    assert len(str(refusal.value)) < 1000
