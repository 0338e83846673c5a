"""Training as a Python function."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from separable import fit_separable, linear_net, separable
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.schema import TrainConfig
from lockstep.data.sharding import Sharding
from lockstep.errors import CheckpointError, ConfigError, DataError, LoaderError, NonFiniteLossError
from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints.checkpoint_folder import load_model
from lockstep.train import EarlyStopping, Result, fit
from lockstep.train.inference import load_network

_fit = partial(fit_separable, epochs=1, val=16)  # 4 steps an epoch


def test_it_learns_and_leaves_a_run(tmp_path: Path) -> None:
    result = _fit(tmp_path / "run", epochs=3, lr=0.1, train=320, val=64)
    assert result.samples == 64
    assert result.top1 > 0.95
    assert result.steps == 60
    last = list(read_records(result.run_dir / "metrics.jsonl"))[-1]
    assert (last["split"], last["top1"], last["epoch"]) == ("val", result.top1, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "lr": 0.01, "ema_decay": 0.9},
        {"precision": "bf16", "accumulate": 2, "clip_norm": 1.0},
        {"channels_last": True, "drop_last": True, "label_smoothing": 0.1, "schedule": "onecycle"},
        {"precision": "fp64", "optimizer": "adam", "lr": 0.01},
    ],
)
def test_options_learn_too(tmp_path: Path, settings: dict[str, object]) -> None:
    assert fit_separable(tmp_path, **{"lr": 0.1, "train": 330, "val": 64, **settings}).top1 > 0.9


@pytest.mark.parametrize(
    ("settings", "newest"),
    [({"checkpoint_steps": 1}, "step-0000"), ({"log_every": 1}, "none yet"), ({"log_every": 20}, "none yet")],
)
def test_nan_stops_with_the_step_and_last_good_checkpoint(
    tmp_path: Path, settings: dict[str, int], newest: str
) -> None:
    images, labels = separable(320, 1).tensors
    images[200] = float("nan")
    step = next(step for step, share in enumerate(Sharding(320, 16, 0, 1, 0).epoch(0), start=1) if 200 in share)
    message = rf"the loss is nan at step {step} .*last good checkpoint: .*{newest}"
    common = {"epochs": 1, "batch_size": 16, "loader_workers": 0, "run_dir": tmp_path}
    with pytest.raises(NonFiniteLossError, match=message):
        fit(linear_net(), TensorDataset(images, labels), separable(64, 2), **common, **settings)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept[-1:] == ([f"step-{step - 1:08d}"] if "checkpoint_steps" in settings else [])


def test_an_unwritable_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        fit_separable(tmp_path / "file" / "run")


def test_a_run_without_a_folder_is_named_after_data_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = fit(linear_net(), separable(64, 1), separable(16, 2), max_steps=1)
    assert result.run_dir.parent == Path("runs")
    assert result.run_dir.name.startswith("TensorDataset-Sequential-2")


@pytest.mark.parametrize("training", [True, False])
def test_a_loader_process_that_dies_in_a_step_is_named(tmp_path: Path, training: bool) -> None:
    class Interrupted(nn.Flatten):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            # As torch's handler of SIGCHLD raises it, wherever the main thread is; one blank image checks the model.
            if self.training == training and len(images) > 1:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
            return super().forward(images)

    model = nn.Sequential(Interrupted(), linear_net())
    with pytest.raises(LoaderError, match=r"a loader process exited .*Killed") as error:
        fit(model, separable(64, 1), separable(64, 2), epochs=1, loader_workers=0, run_dir=tmp_path)
    assert error.value.retryable


def test_resuming_from_an_older_checkpoint_drops_later_ones(tmp_path: Path) -> None:
    _fit(tmp_path, epochs=4, keep=9)
    older = tmp_path / "checkpoints" / "step-00000004"
    result = _fit(tmp_path, epochs=4, keep=9, max_steps=6, resume=str(older))
    assert result.steps == 6
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best", "step-00000004", "step-00000006"]
    assert (tmp_path / "checkpoints" / "best").resolve().name in names
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "step"]
    assert steps == [4, 6]


def test_resuming_into_another_folder_leaves_the_old_one_alone(tmp_path: Path) -> None:
    first = _fit(tmp_path / "a")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*"))
    again = _fit(tmp_path / "b", resume=str(tmp_path / "a"))
    assert (again.top1, again.best_top1) == (first.top1, first.top1)
    assert (tmp_path / "b" / "model.safetensors").exists()
    assert again.history.train["loss"].tolist() == first.history.train["loss"].tolist()
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*")) == before


def test_names_in_checkpoints_stay(tmp_path: Path) -> None:
    """By them, checkpoints of other versions are read."""
    _fit(tmp_path, ema_decay=0.9)
    folder, weights = tmp_path / "checkpoints" / "step-00000004", {*linear_net().state_dict()}
    values = json.loads((folder / "state.json").read_text())["states"]
    assert sorted(values) == ["average", "optimizer", "precision", "strategy"]
    assert values["precision"] == {"name": "fp32"}
    assert {*load_file(folder / "model.safetensors")} == weights
    momentum = {f"optimizer.state.{number}.momentum_buffer" for number in range(len(weights))}
    average = {"average.n_averaged", *(f"average.module.{name}" for name in weights)}
    assert {*load_file(folder / "states.safetensors")} == momentum | average


def test_flags_of_the_session_beat_the_optimizers_saved_ones(tmp_path: Path) -> None:
    _fit(tmp_path, epochs=2, max_steps=4, weight_decay=0.0)
    _fit(tmp_path, epochs=2, resume="auto", weight_decay=0.25)
    state = json.loads((tmp_path / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert [group["weight_decay"] for group in state["states"]["optimizer"]["param_groups"]] == [0.25]


def _fit_tokens(path: Path, target: Any, model: Any = None, inputs: Any = None, **settings: Any) -> Result:
    """Train on sequences of 6 tokens, all with the same target."""
    items = [(torch.arange(6) if inputs is None else inputs, target)] * 16
    model = model or nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(24, 2))
    return fit(model, items, items, **{"epochs": 1, "batch_size": 8, "loader_workers": 0, "run_dir": path} | settings)


@pytest.mark.parametrize("processes", [0, 1])
def test_text_classifier_has_accuracies(tmp_path: Path, processes: int) -> None:
    result = _fit_tokens(tmp_path, 1, loader_workers=processes, lr=0.5, label_smoothing=0.1)
    assert (result.top1, result.best_top1, result.classes) == (1.0, 1.0, ("0", "1"))
    assert result.confusion_matrix.tolist() == [[0, 0], [0, 16]]
    run, *_ = read_records(tmp_path / "metrics.jsonl")
    assert run["items"] == "samples"


def _squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert outputs.dtype == targets.dtype
    return (outputs.mean(1) - targets) ** 2


def test_number_is_learned_with_the_best_weights_by_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _fit_tokens(
        tmp_path / "run", 2.5, loss=_squares, lr=0.01, epochs=20, callbacks=[EarlyStopping(patience=20)]
    )
    assert result.loss < 0.1
    assert math.isnan(result.top1)
    assert result.classes == ()
    with pytest.raises(ValueError, match="no confusion matrix"):
        _ = result.per_class_accuracy
    *_, conclusion, _, best = capsys.readouterr().out.splitlines()
    assert conclusion.startswith(f"loss {result.loss:.4f} (mean of 16 validation samples")
    assert best.startswith(f"best loss {min(result.history.val['loss']):.4f} after step")
    with pytest.raises(CheckpointError, match="does not classify images; load the weights into your model"):
        load_network(result.run_dir)
    assert load_model(result.run_dir)[1]["input"] is None


def test_uint8_images_are_scaled_and_masks_are_not(tmp_path: Path) -> None:
    seen = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((float(outputs.max().detach()), targets.dtype, int(targets.max())))
        return outputs.flatten(1).mean(1)

    model = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(model.weight)
    image = torch.full((1, 4, 4), 255, dtype=torch.uint8)
    _fit_tokens(tmp_path, image[0], model, image, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.0))
    assert set(seen) == {(1.0, torch.uint8, 255)}


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (0.5, {}, "label 0.5: .*; targets that are not classes need loss="),
        (0.5, {"loss": _squares, "desired_acc": 0.9}, "desired_acc= needs integer classes as targets, which list does"),
        (1, {"label_smoothing": 0.1, "channels_last": True}, "channels_last= needs images as inputs, which list does"),
        (1, {"mixup": 0.2, "cutmix": 1.0}, "mixup=, cutmix= needs images as inputs"),
        (1, {"model": nn.Linear(3, 2)}, "model= cannot take the inputs of the training set: .*mat1"),
        (3, {"loss": _squares}, r"4 classes: return logits \[N, 4\]; if the targets are numbers and not classes, make"),
        (0.5, {"loss": lambda outputs, _: outputs}, r"shape \[8, 2\] for 8 samples; return one loss per sample"),
        (1, {"collate_fn": lambda items: items[0][0]}, "collate_fn= returned a tensor"),
    ],
)
def test_what_needs_other_items_is_refused(tmp_path: Path, target: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        _fit_tokens(tmp_path, target, **settings)


# What a user's own data set does itself, and what `fit` is given otherwise.
NOT_FOR_FIT = {
    *("arch", "dataset", "data", "data_dir", "download", "in_memory", "image_size", "bits", "evaluate", "decode"),
    *("skip_corrupt", "shift", "shift_padding", "flip", "flip_alternate", "rotate", "zoom"),
    *("shear", "cutout", "min_crop", "rand_augment", "rand_augment_magnitude", "trivial_augment", "random_erasing"),
}
OTHERWISE = {"lr_scaling": "none"}  # than a flag's default
WIDER = {"run_dir", "resume", "track", "optimizer", "freeze"}  # than a flag's type


def test_the_signature_has_every_setting_with_its_default() -> None:
    parameters, hints = inspect.signature(fit).parameters, get_type_hints(fit)
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    left = set(parameters)
    groups = {field.name: field.default_factory for field in dataclasses.fields(TrainConfig)}
    for kind in (TrainConfig, *(kind for kind in groups.values() if kind is not dataclasses.MISSING)):
        types = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in NOT_FOR_FIT or field.default is dataclasses.MISSING:
                assert field.name not in set(parameters) - {"model"}
                continue
            left.remove(field.name)
            assert parameters[field.name].default == OTHERWISE.get(field.name, field.default), field.name
            if field.name not in WIDER:
                assert hints[field.name] == types[field.name], field.name
    assert left == {
        *("model", "train_set", "val_set"),
        *("loss", "metrics", "collate_fn", "callbacks", "scheduler", "scheduler_interval"),
    }


def test_lr_is_the_rate_of_the_steps_unless_scaling_is_asked_for(tmp_path: Path) -> None:
    rates = []
    for name, settings in (("plain", {}), ("scaled", {"lr_scaling": "linear", "lr_base_batch": 8})):
        _fit(tmp_path / name, schedule="constant", lr=0.25, train=32, **settings)
        rates += [r["lr"] for r in read_records(tmp_path / name / "metrics.jsonl") if r["kind"] == "step"]
    assert rates == [0.25, 0.5]


def test_paths_may_be_strings_or_paths_and_sequences_lists(tmp_path: Path) -> None:
    common = {"batch_size": 16, "loader_workers": 0, "track": [], "lr_milestones": [1.0]}
    first = fit(linear_net(), separable(32, 1), separable(16, 2), epochs=1, run_dir=str(tmp_path / "run"), **common)
    again = fit(linear_net(), separable(32, 1), separable(16, 2), epochs=2, resume=first.run_dir, **common)
    assert (again.steps, again.run_dir) == (4, first.run_dir)


def test_a_model_without_a_parameter_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trainable parameters: all have requires_grad=False or"):
        fit_separable(tmp_path, linear_net().requires_grad_(False))


class TwoHeads(nn.Linear):
    def __init__(self, inputs: int, outputs: int, in_evaluation: bool = True) -> None:
        super().__init__(inputs, outputs)
        self.in_evaluation = in_evaluation

    def forward(self, images: torch.Tensor) -> Any:
        logits = super().forward(images.flatten(1))
        return (logits, logits) if self.training or self.in_evaluation else logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(7, 3), r"model= cannot take images of shape \[3, 4, 4\]: .*mat1 and mat2"),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), r"shape \[1, 2\] for one image, .* 3 classes: return logits"),
        (nn.Conv2d(3, 3, 1), r"a tensor of shape \[1, 3, 4, 4\] for one image"),
        (TwoHeads(48, 3), "model= returned a tuple for one image"),
        (TwoHeads(48, 3, in_evaluation=False), "TwoHeads returned a tuple for two images in training mode; return"),
        ("resnet18", "model='resnet18' is not a torch.nn.Module"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_named(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(model, separable(32, 1), separable(16, 2), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
