"""Files of older scripts: each form is read, goes on as its script would have, and is refused where it does not fit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attack import Attack
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.schema import RunConfig, TrainConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints.legacy_format import is_old, load_weights, read
from lockstep.train import Result, fit
from lockstep.train.begin import begin_at
from lockstep.train.progress import Progress

SAMPLES, FINISHED, EPOCHS = 24, 2, 5
_RATE = {"lr": 0.05, "lr_scaling": "none", "schedule": "constant", "nesterov": False, "weight_decay": 1e-3}
SETTINGS: dict[str, Any] = {
    **_RATE,
    "batch_size": SAMPLES,
    "loader_workers": 0,
    "track": (),
    "log_every": 1,
    "device": "cpu",
}


def net() -> nn.Module:
    """Convolution, batch norm and a classifier, with weights that the seed decides."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 1, 6, 6, generator=generator), torch.arange(SAMPLES) % 3)


class PlainScript:
    """What the older scripts did, in one batch an epoch, so that the order of samples is of no account."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = net()
        self.start_optimizer()

    def start_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)

    def train(self, epochs: int) -> PlainScript:
        pixels, labels = images().tensors
        for _ in range(epochs):
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(pixels), labels).backward()
            self.optimizer.step()
        return self


def _cifar(script: PlainScript) -> dict[str, Any]:
    wrapped = nn.DataParallel(script.net).state_dict()
    return {"net": wrapped, "acc": np.float64(93.5), "epoch": FINISHED - 1}


def _imagenet(script: PlainScript) -> dict[str, Any]:
    state = {f"module.{name}": tensor for name, tensor in script.net.state_dict().items()}
    best = torch.tensor(93.5)
    return {
        "epoch": FINISHED,
        "arch": "resnet18",
        "state_dict": state,
        "best_acc1": best,
        "optimizer": script.optimizer.state_dict(),
        "scheduler": {"last_epoch": 2, "_step_count": 3},
    }


def _apex(script: PlainScript) -> dict[str, Any]:
    content = _imagenet(script)
    content["best_prec1"] = float(content.pop("best_acc1"))
    return content | {"amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}}}


def _horovod(script: PlainScript) -> dict[str, Any]:
    return {"model": script.net.state_dict(), "optimizer": script.optimizer.state_dict()}


def _tutorial(script: PlainScript) -> dict[str, Any]:
    """As PyTorch's tutorial on saving has it."""
    return {
        "epoch": FINISHED - 1,
        "model_state_dict": script.net.state_dict(),
        "optimizer_state_dict": script.optimizer.state_dict(),
    }


def _with_epoch(script: PlainScript) -> dict[str, Any]:
    return _horovod(script) | {"epoch": FINISHED - 1}


def _compiled(script: PlainScript) -> dict[str, Any]:
    state = {f"module._orig_mod.{name}": tensor for name, tensor in script.net.state_dict().items()}
    return _imagenet(script) | {"state_dict": state}


def _timm(script: PlainScript) -> dict[str, Any]:
    options = argparse.Namespace(model="resnet18", opt="sgd")
    content = _imagenet(script) | {"epoch": FINISHED - 1, "version": 2, "args": options, "metric": 93.5}
    del content["best_acc1"]
    return content | {"amp_scaler": {"scale": 1024.0, "_growth_tracker": 3}}


def _torchvision(script: PlainScript) -> dict[str, Any]:
    return _with_epoch(script) | {"lr_scheduler": {"last_epoch": 2}, "args": argparse.Namespace(model="resnet18")}


FORMS = {
    "ckpt.pth": _cifar,
    "checkpoint.pth.tar": _imagenet,
    "model_best.pth.tar": _apex,
    f"checkpoint-{FINISHED}.pth.tar": _horovod,
    "mine.pt": _with_epoch,
    "compiled.pt": _compiled,
    "last.pth.tar": _timm,
    "model_1.pth": _torchvision,
    "model.tar": _tutorial,
}


def _resume(file: Path, **settings: Any) -> Result:
    data = images()
    run_dir = settings.pop("run_dir", file.parent / "run")
    return fit(net(), data, data, epochs=EPOCHS, resume=str(file), run_dir=run_dir, **{**SETTINGS, **settings})


def _assert_equal(result: Result, script: PlainScript) -> None:
    newest = max((result.run_dir / "checkpoints").glob("step-*"))
    torch.testing.assert_close(load_file(newest / "model.safetensors"), dict(script.net.state_dict()))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_each_form_continues_from_its_weights(
    tmp_path: Path, name: str, zipped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = PlainScript().train(FINISHED)
    torch.save(FORMS[name](script), tmp_path / name, _use_new_zipfile_serialization=zipped)
    script.start_optimizer()
    result = _resume(tmp_path / name)
    script.train(EPOCHS - FINISHED)
    _assert_equal(result, script)
    records = [record for record in read_records(result.run_dir / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["epoch"] for record in records] == [3, 4, 5]
    output = capsys.readouterr().out
    assert "2 epochs finished" in output
    has_best = name in ("ckpt.pth", "checkpoint.pth.tar", "model_best.pth.tar", "compiled.pt")
    assert ("best top-1 93.50 %" in output) == has_best
    assert "the optimizer starts without the file's state, momentum at zero" in output


@pytest.mark.parametrize("precision", ["O2", "fp64", "bf16"])
def test_weights_reach_every_copy_of_them(tmp_path: Path, precision: str) -> None:
    script = PlainScript().train(FINISHED)
    torch.save(_imagenet(script) | {"epoch": EPOCHS}, tmp_path / "old.pth")
    result = _resume(tmp_path / "old.pth", precision=precision)  # evaluates what computes; saves what is trained
    pixels, labels = images().tensors
    expected = F.cross_entropy(script.net.eval()(pixels), labels).item()
    assert result.loss == pytest.approx(expected, rel=0.02)
    newest = max((result.run_dir / "checkpoints").glob("step-*"))
    saved = load_file(newest / "model.safetensors")["4.weight"]
    torch.testing.assert_close(saved.float(), script.net[4].weight.detach())


def test_bare_state_dict_starts_where_start_epoch_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(PlainScript().train(1).net.state_dict(), tmp_path / "weights.pt")
    assert _resume(tmp_path / "weights.pt", run_dir=tmp_path / "zero").steps == EPOCHS
    assert "does not record the number of finished epochs" in capsys.readouterr().out
    result = _resume(tmp_path / "weights.pt", start_epoch=4, ema_decay=0.5)
    steps = [record["step"] for record in read_records(result.run_dir / "metrics.jsonl") if record["kind"] == "step"]
    assert steps == [5]


def test_a_file_of_a_finished_run_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = PlainScript().train(FINISHED)
    torch.save(_imagenet(script) | {"epoch": EPOCHS}, tmp_path / "old.pth")
    result = _resume(tmp_path / "old.pth", ema_decay=0.5)
    pixels, labels = images().tensors
    expected = (script.net.eval()(pixels).argmax(1) == labels).double().mean().item()
    assert result.top1 == pytest.approx(expected)
    assert "no epochs left to train (--epochs 5)" in capsys.readouterr().out


def test_start_epoch_moves_locksteps_own_runs_to_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = images()
    fit(net(), data, data, epochs=3, run_dir="first", **SETTINGS)
    kept = sorted(Path("first/checkpoints").iterdir())
    moved = fit(net(), data, data, epochs=3, resume="first", start_epoch=1, **SETTINGS)
    assert moved.run_dir.parent == Path("runs")
    assert sorted(Path("first/checkpoints").iterdir()) == kept
    assert [r["step"] for r in read_records(moved.run_dir / "metrics.jsonl") if r["kind"] == "step"] == [2, 3]
    same = fit(net(), data, data, epochs=4, resume="first", start_epoch=3, **SETTINGS)
    assert same.run_dir.parent == Path("runs")  # also where it begins at the epoch that is due anyway
    late = fit(net(), data, data, epochs=3, start_epoch=2, run_dir="late", **SETTINGS)
    assert [r["step"] for r in read_records(late.run_dir / "metrics.jsonl") if r["kind"] == "step"] == [3]
    with pytest.raises(ConfigError, match="--start-epoch 4 is past the last epoch, --epochs 3"):
        fit(net(), data, data, epochs=3, start_epoch=4, run_dir="past", **SETTINGS)
    with pytest.raises(ConfigError, match="contains checkpoints of an earlier run"):
        fit(net(), data, data, epochs=3, resume="first", start_epoch=1, run_dir="first", **SETTINGS)


def test_skipped_steps_before_start_epoch_do_not_count_after_it() -> None:
    config = TrainConfig(run=RunConfig(start_epoch=1))
    begun = begin_at(Progress(step=30, skipped_steps=25, skipped_in_a_row=3), config, steps_per_epoch=10)
    assert (begun.step, begun.steps_taken, begun.skipped_in_a_row) == (10, 10, 0)


def test_whole_model_is_refused_with_what_to_save(tmp_path: Path) -> None:
    torch.save({"net": net(), "acc": 1.0, "epoch": 1}, tmp_path / "ckpt.t7")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules.* save its state_dict\(\) instead"):
        read(tmp_path / "ckpt.t7")


@pytest.mark.parametrize("keep", [0, 10, 1000, -40])
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_files_are_named(tmp_path: Path, keep: int, zipped: bool) -> None:
    path = tmp_path / "ckpt.pth"
    torch.save(_imagenet(PlainScript().train(1)), path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=str(path)):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_dict": 3}, "no weights under net, state_dict, model_state_dict, model"),
        ({"state_dict": {}}, "no weights under net"),
        ({"epoch": "two"}, "invalid epoch: 'two' is not a number"),
        ({"epoch": -1}, "invalid epoch: -1"),
        *(({name: 10**400}, "too large") for name in ("epoch", "best_acc1")),
        ({"epoch": 1.5}, "invalid epoch: 1.5"),
        ({"best_acc1": torch.ones(2)}, "invalid best accuracy: "),
    ],
)
def test_other_contents_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    torch.save(_imagenet(PlainScript()) | change, tmp_path / "ckpt.pth")
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "ckpt.pth")
    torch.save([1, 2], tmp_path / "ckpt.pth")
    with pytest.raises(CheckpointError, match="contains a list"):
        read(tmp_path / "ckpt.pth")


def test_another_networks_weights_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pth"
    torch.save(_imagenet(PlainScript()), path)
    with pytest.raises(CheckpointError, match=r"weight is missing, .* is unknown, .* more"):
        load_weights(read(path), nn.Linear(3, 3, bias=False), "mine")
    wider = net()
    wider[0] = nn.Conv2d(2, 4, 3, bias=False)
    with pytest.raises(CheckpointError, match=r"-a resnet18\): .* shape \(4, 1, 3, 3\), expected \(4, 2, 3, 3\)"):
        load_weights(read(path), wider, "mine")
    with pytest.raises(CheckpointError, match="use -a torchvision/resnet18"):
        load_weights(read(path), wider, "resnet18")


def test_inner_wrappers_and_missing_counters_are_no_obstacle(tmp_path: Path) -> None:
    state = {
        name.replace("0.", "0.module.", 1) if name.startswith("0.") else name: tensor
        for name, tensor in net().state_dict().items()
        if "num_batches" not in name
    }
    torch.save(state, tmp_path / "old.pth")
    fresh = net()
    load_weights(read(tmp_path / "old.pth"), fresh, "mine")
    assert torch.equal(fresh[0].weight, state["0.module.weight"])


def test_numbers_of_numpy_are_read_without_numpy(tmp_path: Path) -> None:
    for number in (np.float64(93.5), np.float32(93.5), 93.5, torch.tensor(93.5)):
        torch.save({"net": net().state_dict(), "acc": number, "epoch": np.int64(4)}, tmp_path / "ckpt.pth")
        old = read(tmp_path / "ckpt.pth")
        assert (old.top1, old.epochs) == (0.935, 5)
    torch.save({"net": {}, "acc": np.zeros(1, object)[0], "x": np.array([Attack(eval, "1")])}, tmp_path / "ckpt.pth")
    with pytest.raises(CheckpointError, match="not loaded"):
        read(tmp_path / "ckpt.pth")


def test_folders_and_exported_files_are_not_old(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_old(tmp_path)
    assert not is_old(tmp_path / "nothing")
    assert not is_old(tmp_path / "model.safetensors")
