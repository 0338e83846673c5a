"""Parameters that training leaves as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import weights_of
from separable import separable
from torch import nn

from lockstep.errors import CheckpointError, ConfigError
from lockstep.train import fit
from lockstep.train.checkpoints.checkpoint_format import describe_file
from lockstep.train.optim.build import describe_frozen, freeze


def _net() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.ModuleDict({"layer1": block, "layer10": nn.Conv2d(4, 4, 1), "head": nn.Linear(4, 3)})


@pytest.mark.parametrize(
    ("patterns", "frozen", "norms"),
    [
        ((), [], 0),
        (("layer1",), ["layer1.0.weight", "layer1.0.bias", "layer1.1.weight", "layer1.1.bias"], 1),
        (("layer1.0.*", "head.bias"), ["layer1.0.weight", "layer1.0.bias", "head.bias"], 0),
        (("layer*.weight",), ["layer1.0.weight", "layer1.1.weight", "layer10.weight"], 1),
    ],
)
def test_patterns_are_names_of_modules_or_globs(patterns: tuple[str, ...], frozen: list[str], norms: int) -> None:
    model = _net()
    assert len(freeze(model, patterns)) == norms
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


def test_pattern_without_match_lists_the_parameter_names() -> None:
    with pytest.raises(
        ConfigError, match=r"--freeze xyz: no parameter .*; the model's modules are layer1, layer10, head"
    ):
        freeze(_net(), ["head", "xyz"])
    with pytest.raises(ConfigError, match=r"--freeze layer1\.1\.wight: .*did you mean layer1\.1\.weight"):
        freeze(_net(), ["layer1.1.wight"])


def test_it_reports_how_many_parameters_train() -> None:
    model = _net()
    assert describe_frozen(model) == []
    freeze(model, ["layer1", "layer10"])
    assert describe_frozen(model) == ["training 15 of 155 parameters; 6 of 8 tensors are frozen"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(images)))  # type: ignore[no-any-return]


def test_only_frozen_batch_norms_keep_their_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {"epochs": 2, "batch_size": 16, "loader_workers": 0, "track": (), "lr": 0.05}
    fit(model, separable(64, 1), separable(32, 2), freeze="backbone", run_dir=tmp_path, **settings)
    same = {name for name, value in weights_of(tmp_path).items() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith("backbone.")}
    assert "training 163 of 403 parameters; 4 of 8 tensors are frozen" in capsys.readouterr().out


def test_a_run_with_other_frozen_parameters_does_not_go_on(tmp_path: Path) -> None:
    settings = {"batch_size": 16, "loader_workers": 0, "track": (), "run_dir": tmp_path, "resume": "auto"}
    fit(Classifier(), separable(64, 1), separable(32, 2), freeze=["backbone"], epochs=1, **settings)
    with pytest.raises(CheckpointError, match=r"with --freeze \['backbone'\], not \[\]"):
        fit(Classifier(), separable(64, 1), separable(32, 2), epochs=2, **settings)
    assert fit(Classifier(), separable(64, 1), separable(32, 2), freeze=["backbone"], epochs=2, **settings).steps == 8


def test_a_checkpoint_from_before_there_was_freezing_goes_on(tmp_path: Path) -> None:
    settings = {"batch_size": 16, "loader_workers": 0, "track": (), "run_dir": tmp_path, "resume": "auto"}
    fit(Classifier(), separable(64, 1), separable(32, 2), epochs=1, **settings)
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    state, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    content = json.loads(state.read_text())
    del content["job"]["--freeze"]
    state.write_text(json.dumps(content))
    files = json.loads(manifest.read_text())
    files["files"]["state.json"] = describe_file(state)
    manifest.write_text(json.dumps(files))
    assert fit(Classifier(), separable(64, 1), separable(32, 2), epochs=2, **settings).steps == 8
