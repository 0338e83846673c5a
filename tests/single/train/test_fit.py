"""Training as a Python function."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import CheckpointError, ConfigError, DataError, NonFiniteLossError
from lockstep.files.jsonl import read_records
from lockstep.train import fit
from lockstep.train.fit import configure


def _separable(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    images = torch.randn(samples, 3, 4, 4, generator=generator) * 0.3
    images[torch.arange(samples), labels] += 1
    return TensorDataset(images, labels)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 3))


def test_it_learns_and_leaves_a_run(tmp_path: Path) -> None:
    settings = {"epochs": 3, "batch_size": 16, "lr": 0.1, "loader_workers": 0, "run_dir": tmp_path / "run"}
    result = fit(_net(), _separable(320, 1), _separable(64, 2), **settings)
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
    common = {"epochs": 3, "batch_size": 16, "lr": 0.1, "loader_workers": 0, "run_dir": tmp_path}
    assert fit(_net(), _separable(330, 1), _separable(64, 2), **{**common, **settings}).top1 > 0.9


@pytest.mark.filterwarnings("default")  # torch's compiler warns of itself, of other things with each version
def test_compiled_training_is_the_same_training(tmp_path: Path) -> None:
    common = {"epochs": 1, "batch_size": 16, "lr": 0.1, "loader_workers": 0, "max_steps": 4}
    losses = [
        fit(
            _net(), _separable(320, 1), _separable(64, 2), compile=compiled, run_dir=tmp_path / str(compiled), **common
        ).loss
        for compiled in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_nan_stops_with_the_step_named_and_no_bad_checkpoint(tmp_path: Path) -> None:
    images, labels = _separable(320, 1).tensors
    images[200] = float("nan")
    settings = {"epochs": 1, "batch_size": 16, "loader_workers": 0, "run_dir": tmp_path, "checkpoint_steps": 1}
    with pytest.raises(
        NonFiniteLossError, match=r"the loss is nan at step \d+ .*last good checkpoint.*step-0000"
    ) as caught:
        fit(_net(), TensorDataset(images, labels), _separable(64, 2), **settings)
    step = int(str(caught.value).split("step ")[1].split()[0])
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{step - 1:08d}"


def test_the_exact_step_is_named_between_reports(tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch_size": 16, "loader_workers": 0, "log_every": 20}
    images, labels = _separable(320, 1).tensors
    images[200] = float("nan")
    steps = set()
    for name, every in (("a", 1), ("b", 20)):
        with pytest.raises(NonFiniteLossError) as caught:
            fit(
                _net(),
                TensorDataset(images, labels),
                _separable(64, 2),
                **{**settings, "log_every": every, "run_dir": tmp_path / name},
            )
        steps.add(str(caught.value).split("step ")[1].split()[0])
    assert len(steps) == 1


def test_an_unwritable_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        fit(_net(), _separable(32, 1), _separable(16, 2), run_dir=tmp_path / "file" / "run")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    common = {"batch_size": 16, "epochs": 1, "loader_workers": 0, "run_dir": tmp_path}
    fit(_net(), _separable(64, 1), _separable(16, 2), **common)
    wider = nn.Sequential(nn.Flatten(), nn.Linear(48, 3, bias=False))
    with pytest.raises(CheckpointError, match="does not fit this model"):
        fit(wider, _separable(64, 1), _separable(16, 2), resume="auto", **common)


def test_a_finished_run_resumed_only_evaluates(tmp_path: Path) -> None:
    common = {"batch_size": 16, "epochs": 1, "loader_workers": 0, "run_dir": tmp_path}
    first = fit(_net(), _separable(64, 1), _separable(16, 2), **common)
    again = fit(_net(), _separable(64, 1), _separable(16, 2), resume="auto", **common)
    assert (again.steps, again.loss, again.top1) == (first.steps, first.loss, first.top1)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no setting 'epoch'; did you mean 'epochs'"):
        configure(epoch=3)


def test_a_set_of_another_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="items must be"):
        fit(_net(), [1, 2, 3], _separable(16, 2), run_dir=tmp_path)


def test_a_run_without_a_folder_of_its_own_is_named_after_data_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = fit(_net(), _separable(64, 1), _separable(16, 2), batch_size=16, max_steps=1, loader_workers=0)
    assert result.run_dir.parent == Path("runs")
    assert result.run_dir.name.startswith("TensorDataset-Sequential-2")


def test_a_new_run_does_not_touch_the_checkpoints_of_an_old_one(tmp_path: Path) -> None:
    common = {"batch_size": 16, "epochs": 1, "loader_workers": 0, "run_dir": tmp_path}
    fit(_net(), _separable(64, 1), _separable(16, 2), **common)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="--resume auto"):
        fit(_net(), _separable(64, 1), _separable(16, 2), **common)
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def test_a_loader_process_that_dies_is_named(tmp_path: Path) -> None:
    class Deadly(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            if multiprocessing.parent_process() is not None and index == 200:
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    with pytest.raises(DataError, match="a loader process has ended"):
        fit(_net(), Deadly(*_separable(320, 1).tensors), _separable(64, 2), loader_workers=2, run_dir=tmp_path)


def test_resuming_from_an_older_checkpoint_abandons_the_later_ones(tmp_path: Path) -> None:
    common = {"batch_size": 16, "loader_workers": 0, "run_dir": tmp_path, "keep": 9, "lr": 0.1}
    fit(_net(), _separable(64, 1), _separable(16, 2), epochs=4, **common)
    older = tmp_path / "checkpoints" / "step-00000004"
    result = fit(_net(), _separable(64, 1), _separable(16, 2), epochs=4, max_steps=6, resume=str(older), **common)
    assert result.steps == 6
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best", "step-00000004", "step-00000006"]
    assert (tmp_path / "checkpoints" / "best").resolve().name in names
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "step"]
    assert steps == [4, 6]


def test_resuming_into_another_folder_leaves_the_old_one_alone_and_has_a_best_of_its_own(tmp_path: Path) -> None:
    common = {"batch_size": 16, "epochs": 1, "loader_workers": 0}
    first = fit(_net(), _separable(64, 1), _separable(16, 2), run_dir=tmp_path / "a", **common)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*"))
    resume = {"resume": str(tmp_path / "a"), "run_dir": tmp_path / "b"}
    again = fit(_net(), _separable(64, 1), _separable(16, 2), **resume, **common)
    assert (again.top1, again.best_top1) == (first.top1, first.top1)
    assert (tmp_path / "b" / "model.safetensors").exists()
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "a").rglob("*")) == before


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    images, labels = _separable(64, 1).tensors
    settings = {"batch_size": 16, "epochs": 2, "loader_workers": 0, "run_dir": tmp_path, "lr": 1e38}
    with pytest.raises(NonFiniteLossError, match="weights are NaN or infinite after step 1; no checkpoint"):
        fit(_net(), TensorDataset(100 * images, labels), _separable(16, 2), checkpoint_steps=1, **settings)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_flags_of_the_session_beat_the_optimizers_saved_ones(tmp_path: Path) -> None:
    common = {"batch_size": 16, "loader_workers": 0, "run_dir": tmp_path, "epochs": 2}
    fit(_net(), _separable(64, 1), _separable(16, 2), max_steps=4, weight_decay=0.0, **common)
    fit(_net(), _separable(64, 1), _separable(16, 2), resume="auto", weight_decay=0.25, **common)
    state = json.loads((tmp_path / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert [group["weight_decay"] for group in state["optimizer"]["groups"]] == [0.25]


def test_a_checkpoint_due_by_steps_at_an_epochs_end_is_written(tmp_path: Path) -> None:
    settings = {"batch_size": 16, "loader_workers": 0, "run_dir": tmp_path, "epochs": 3, "keep": 9}
    fit(_net(), _separable(64, 1), _separable(16, 2), checkpoint_epochs=0, checkpoint_steps=4, **settings)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000004", "step-00000008", "step-00000012"]


def test_a_stop_within_an_epoch_does_not_double_its_records(tmp_path: Path) -> None:
    common = {"batch_size": 16, "loader_workers": 0, "run_dir": tmp_path, "epochs": 2}
    fit(_net(), _separable(64, 1), _separable(16, 2), max_steps=6, **common)
    fit(_net(), _separable(64, 1), _separable(16, 2), resume="auto", **common)
    epochs = [(r["epoch"], r["split"]) for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "epoch"]
    assert epochs == [(1, "train"), (1, "val"), (2, "train"), (2, "val")]


def test_settings_that_fit_takes_as_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave out arch, image_size"):
        fit(_net(), _separable(32, 1), _separable(16, 2), arch="resnet18", image_size=32)
