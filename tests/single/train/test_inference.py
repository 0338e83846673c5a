"""Evaluation is one thing: a run's own, `lockstep eval`, `predict` and an exported program see the same pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.cli import main
from lockstep.config.schema import DataConfig, TrainConfig
from lockstep.data.pipeline.decode import evaluation_pixels
from lockstep.data.sets import InputSpec
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files.jsonl import read_records
from lockstep.models import registry
from lockstep.train.checkpoints import checkpoint_format
from lockstep.train.inference import evaluate_checkpoint, load_network, predict
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

SPEC = InputSpec(1, 8, 8, (0.3,), (0.4,))
ALONE = World(RankInfo(), torch.device("cpu"))
WAYS = {
    "small images cropped": ((32, 32), ["--image-size", "32"]),
    "small images in memory": ((36, 28), []),
    "small images resized into memory": ((40, 40), ["--in-memory", "always", "--image-size", "24"]),
    "large images": ((90, 70), ["--image-size", "32"]),
}


def _train(folder: Path, *flags: str) -> float:
    """Train for an epoch in ./run, and return the loss of its own evaluation."""
    words = ["train", str(folder), "-a", "cifar-small", "-b", "10", "--epochs", "1", "--lr", "0.01", *flags]
    assert main([*words, "-j", "0", "--run-dir", "run", "--track"]) == 0
    (record,) = [each for each in read_records(Path("run/metrics.jsonl")) if each.get("split") == "val"]
    return float(record["loss"])


def _config(folder: Path | str, **data: object) -> TrainConfig:
    return TrainConfig(data=DataConfig(dataset=str(folder), loader_workers=0, **data), batch_size=10)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_eval_and_predict_come_to_the_same_loss(
    way: str,
    new_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    size, flags = WAYS[way]
    folder = new_folder(sizes=(size,), train=10)
    expected = _train(folder, *flags)
    assert main(["export", "run", "-o", "net.safetensors"]) == 0
    assert main(["data", "pack", str(folder), "packed"]) == 0

    for path in ("run", "run/checkpoints/best", "net.safetensors"):  # batches as in the run: equal to the last bit
        for data in (folder, "packed"):
            assert evaluate_checkpoint(_config(data), ALONE, Path(path))["loss"] == expected
    for evaluation in (["eval", "run"], ["train", "-e", "-r", "run"], ["eval", "net.safetensors", str(folder)]):
        capsys.readouterr()
        assert main([*evaluation, "-b", "10", "-j", "0"]) == 0
        assert f"loss {expected:.4f}," in capsys.readouterr().out

    images = sorted(folder.glob("val/*/*"))  # one a batch: equal but for float32's rounding
    shares = [dict(each.classes)[each.path.parent.name] for each in predict(load_network(Path("run")), images, top=2)]
    assert -sum(map(math.log, shares)) / len(shares) == pytest.approx(expected, rel=1e-6)


def test_an_exported_program_comes_to_the_runs_loss(
    new_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size, flags = WAYS["small images cropped"]
    folder = new_folder(sizes=(size,), train=10)
    expected = _train(folder, *flags)
    assert main(["export", "run", "-o", "net.pt2", "--with-normalization"]) == 0
    program, spec = torch.export.load("net.pt2").module(), load_network(Path("run")).input
    pixels = np.stack([evaluation_pixels(path, spec) for path in sorted(folder.glob("val/*/*"))])
    labels = torch.tensor([0] * 5 + [1] * 5)
    logits = program(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous())
    assert F.cross_entropy(logits, labels).item() == pytest.approx(expected, rel=1e-6)


def test_eval_refuses_images_of_another_size(
    new_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_folder(sizes=((40, 40),), train=5)
    _train(folder, "--image-size", "32")
    with pytest.raises(ConfigError, match="--image-size 40: run takes images of 32 x 32 pixels; leave"):
        evaluate_checkpoint(_config(folder, image_size=40), ALONE, Path("run"))
    assert evaluate_checkpoint(_config(folder, image_size=32), ALONE, Path("run"))["samples"] == 10


def test_eval_reads_no_training_image(
    new_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_folder(train=5)
    expected = _train(folder)
    for name in ("blue", "red"):
        (folder / "train" / name / "001.png").write_bytes(b"no image any more")
    assert evaluate_checkpoint(_config(folder), ALONE, Path("run"))["loss"] == expected


def test_a_run_on_synthetic_images_is_evaluated_on_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "synthetic", "-a", "cifar-small", "--image-size", "32", "-b", "64", "--max-steps", "1"]
    assert main([*words, "--run-dir", "run", "--track"]) == 0
    assert evaluate_checkpoint(_config(""), ALONE, Path("run"))["samples"] == 256


def test_data_that_is_code_is_named_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    about = {"arch": "digits-net", "classes": ["a", "b"], "input": asdict(SPEC), "data": "strangers:load"}
    checkpoint_format.export(Path("net.safetensors"), registry.build("digits-net", 2, 1, 8).state_dict(), about)
    Path("strangers.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(CheckpointError, match=r"code and was not run; if you trust it, add --data strangers:load"):
        evaluate_checkpoint(_config(""), ALONE, Path("net.safetensors"))


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    weights = dict(registry.build("digits-net", 2, 1, 8).state_dict())
    about = {"arch": "digits-net", "classes": ["a", "b"], "input": asdict(SPEC), "data": "digits"}
    path = tmp_path / "net.safetensors"
    for value in (math.inf, math.nan):  # masks may be infinite
        weights["11.bias"] = torch.tensor([0.0, value])
        checkpoint_format.export(path, weights, about)
        if value == math.inf:
            load_network(path)
    with pytest.raises(CheckpointError, match=r"net.safetensors: 11.bias contains NaN"):
        load_network(path)
