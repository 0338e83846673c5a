"""Exported models and their predictions."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.cli import main
from lockstep.config.schema import DataConfig, TrainConfig
from lockstep.data.decode import evaluation_pixels
from lockstep.data.sets import InputSpec
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.files.jsonl import read_records
from lockstep.models import registry
from lockstep.run.checkpoints import checkpoint_format
from lockstep.run.checkpoints.checkpoint_folder import CheckpointFolder
from lockstep.run.checkpoints.snapshot import Snapshot
from lockstep.train import export
from lockstep.train.inference import evaluate_checkpoint, load_network, predict
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

SPEC = InputSpec(1, 8, 8, (0.3,), (0.4,))
ABOUT = {"arch": "digits-net", "classes": [str(n) for n in range(10)], "input": asdict(SPEC), "data": "digits"}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported digits-net with random weights, and its folder to be in."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    path = tmp_path / "net.safetensors"
    checkpoint_format.export(path, registry.build("digits-net", 10, 1, 8).state_dict(), ABOUT)
    return path


def _model(source: Path) -> nn.Module:
    model = registry.build("digits-net", 10, 1, 8).eval()
    model.load_state_dict(load_file(source))
    return model


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels, and the same normalized manually."""
    pixels = torch.randint(0, 256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return pixels, (pixels / 255 - SPEC.mean[0]) / SPEC.std[0]


@pytest.mark.parametrize("with_normalization", [False, True])
def test_a_pt2_takes_any_number_of_images(source: Path, with_normalization: bool) -> None:
    done = export.export(source, "torch", Path("net.pt2"), with_normalization)
    assert done.difference < 1e-5
    extra = {export.EXTRA_FILE: ""}
    program = torch.export.load("net.pt2", extra_files=extra).module()
    for count in (1, 2, 7):
        pixels, normalised = _images(count)
        torch.testing.assert_close(program(pixels if with_normalization else normalised), _model(source)(normalised))
    about = json.loads(extra[export.EXTRA_FILE])
    assert about["classes"] == ABOUT["classes"]
    assert about["input"]["mean"] == [0.3]
    assert ("uint8, pixels" if with_normalization else "float32, normalized") in about["takes"]


def test_an_onnx_model_takes_any_number_of_images(source: Path) -> None:
    pytest.importorskip("onnxscript")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    done = export.export(source, "onnx", Path("net.onnx"), with_normalization=True)
    assert done.difference is not None
    session = runtime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 5):
        pixels, normalised = _images(count)
        logits = torch.from_numpy(session.run(["logits"], {"images": pixels.numpy()})[0])
        torch.testing.assert_close(logits, _model(source)(normalised), atol=1e-5, rtol=1e-4)
    model = onnx.load("net.onnx")
    onnx.checker.check_model(model, full_check=True)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(metadata["lockstep"])["arch"] == "digits-net"


NETWORKS = """
import torch
import torch.nn.functional as F
from torch import nn

class Slices(nn.Module):  # tensors that are small parts of a large memory
    def __init__(self, num_classes):
        super().__init__()
        whole = torch.randn(100, 1000)
        self.weight = self.again = nn.Parameter(whole[:num_classes, :64])
        self.constant = whole[20, :num_classes]
        self.register_buffer("bias", whole[15, :num_classes])

    def forward(self, images):
        return F.linear(images.flatten(1), self.weight + self.again, self.bias) + self.constant

class Fickle(nn.Linear):  # other logits at each call
    def __init__(self, num_classes):
        super().__init__(64, num_classes)

    def forward(self, images):
        return super().forward(images.flatten(1)) + torch.rand(())

class Branching(Fickle):
    def forward(self, images):
        return super().forward(images if images.sum() > 0 else -images)
"""


@pytest.fixture
def own(new_module: Callable[[str, str], None]) -> Callable[[str], Path]:
    """Return a function that exports a network of a module in the current folder."""
    new_module("my_networks", NETWORKS)
    return _export_own


def _export_own(name: str) -> Path:
    arch = f"my_networks:{name}"
    path = Path(f"{name}.safetensors")
    weights = {key: tensor.contiguous() for key, tensor in registry.build(arch, 10, 1, 8).state_dict().items()}
    checkpoint_format.export(path, weights, {**ABOUT, "arch": arch})
    return path


def test_a_pt2_holds_only_the_used_part_of_slices(own: Callable[[str], Path]) -> None:
    done = export.export(own("Slices"), "torch", Path("net.pt2"), arch="my_networks:Slices")
    assert done.difference is not None
    assert Path("net.pt2").stat().st_size < 100 * 1000


def test_checkpoint_weights_become_one_file_that_loads_again(source: Path) -> None:
    model = _model(source)
    snapshot = Snapshot(7, model.state_dict(), {"state": {}, "param_groups": []}, {}, ABOUT)
    checkpoints = CheckpointFolder(Path("run/checkpoints"), 1)
    checkpoints.save(lambda: snapshot)
    checkpoints.wait()
    for path in (Path("run"), Path("run/checkpoints/step-00000007")):
        output = export.default_output(path, "safetensors")
        export.export(path, "safetensors", output)
        with safe_open(output, "pt") as file:
            assert json.loads(file.metadata()["lockstep"]) == json.loads(json.dumps(ABOUT))
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in load_file(output).items())


def test_files_are_named_for_what_they_come_from() -> None:
    names = [
        ("runs/digits-1.2/", "torch", "digits-1.2.pt2"),
        ("a/model.safetensors", "onnx", "model.onnx"),
        ("a/../run", "safetensors", "run.safetensors"),
    ]
    for source, kind, name in names:
        assert export.default_output(Path(source), kind) == Path(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Fickle", r"net\.pt2 was not written: its logits differ from the model's by up to 0"),
        ("Branching", r"my_networks:Branching cannot be exported as \.pt2: [^\n]*$"),
    ],
)
def test_a_file_with_other_logits_is_not_left_behind(own: Callable[[str], Path], name: str, error: str) -> None:
    path = own(name)
    with pytest.raises(LockstepError, match=error):
        export.export(path, "torch", Path("net.pt2"), arch=f"my_networks:{name}")
    assert not [*Path().glob("*.pt2*"), *Path().glob(".partial*")]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["net.safetensors", "-o", "net.safetensors"], "is CHECKPOINT itself"),
        (["net.safetensors", "-o", "missing/net.pt2"], "missing/net.pt2: cannot be written: No such file"),
        (["net.safetensors", "-o", "."], "must end in one of .safetensors, .pt2, .onnx"),
        (["net.safetensors", "-o", ".", "--format", "torch"], "is a folder"),
        (["net.safetensors", "-o", "net.pth"], "add --format"),
        (["net.safetensors", "--format", "torch", "onnx", "-o", "net.pt2"], "names one file"),
        (["net.safetensors", "-o", "b.safetensors", "--with-normalization"], "--format torch or onnx"),
    ],
)
def test_wrong_arguments_are_explained(
    source: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main(["export", *words]) == ConfigError.exit_code
    assert complaint in capsys.readouterr().err
    assert sorted(os.listdir()) == ["net.safetensors"]


def test_a_missing_or_foreign_checkpoint_is_named(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": torch.zeros(1)}, "foreign.safetensors")
    for name in ("nothing", "foreign.safetensors"):
        assert main(["export", name, "-o", "out.pt2"]) == CheckpointError.exit_code
        assert name in capsys.readouterr().err
    assert not Path("out.pt2").exists()


def test_missing_packages_are_named_with_the_way_to_get_them(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    assert main(["export", "net.safetensors", "--format", "onnx"]) == ConfigError.exit_code
    assert "pip install 'lockstep-torch[onnx]'" in capsys.readouterr().err


def test_command_reports_what_it_wrote_and_how_it_was_checked(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "net.safetensors", "-o", "x.pt2", "--with-normalization"]) == 0
    out = capsys.readouterr().out
    assert "x.pt2:" in out
    assert "images [N, 1, 8, 8], uint8, pixels; read back; its logits differ from the model's by at most" in out


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


def test_tta_averages_the_logits_of_each_image_and_its_mirror(
    new_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_folder(sizes=((32, 32),), train=10)
    plain = _train(folder)
    network = load_network(Path("run"))
    images, labels = [], torch.tensor([0] * 5 + [1] * 5)
    for path in sorted(folder.glob("val/*/*")):
        pixels = torch.from_numpy(evaluation_pixels(path, network.input).copy()).permute(2, 0, 1)
        images.append(
            (pixels / 255 - torch.tensor(network.input.mean).view(3, 1, 1))
            / torch.tensor(network.input.std).view(3, 1, 1)
        )
    batch, model = torch.stack(images), network.model.eval()
    with torch.inference_mode():
        expected = F.cross_entropy((model(batch) + model(batch.flip(3))) / 2, labels).item()
    capsys.readouterr()
    assert main(["eval", "run", "-b", "10", "-j", "0", "--tta"]) == 0
    assert f"loss {expected:.4f}," in capsys.readouterr().out
    found = evaluate_checkpoint(_config(folder), ALONE, Path("run"), tta=True)["loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    assert abs(found - plain) > 1e-5


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
