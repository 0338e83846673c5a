"""Checks of the job, the model and the replicas."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data.sets import MAX_IMAGE_BYTES, FileSplit, ImageData, InputSpec, MemorySplit
from lockstep.data.sets import describe_custom as users_data
from lockstep.data.sources import digits
from lockstep.errors import ConfigError
from lockstep.run.replicas import ReplicaCheck, equal_tensors
from lockstep.train import inference
from lockstep.train.fit import configure
from lockstep.train.guards import checks
from lockstep.train.guards.checks import check_model, check_same_job, check_training, describe_job, difference
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

CONFIG = configure(lr=0.1, batch_size=8, lr_milestones=(0.4, 0.8))
DATA = digits.load()
MODEL = nn.Linear(4, 2)
OWN = describe_job(CONFIG, DATA, MODEL)
NORMS = {
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3)),
    "batch norm over pixels": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3)),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.LayerNorm(3)),
    "never": lambda: nn.Linear(7, 3),
}


def _said(theirs: Any, ours: Any = OWN) -> str:
    return difference(["a", "b", "c"], [ours, copy.deepcopy(ours), theirs])


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("software", "Lockstep", "0.1", "worker 2's software differs from worker 0's: Lockstep is 0.1, not "),
        ("software", "torch", "2.0", "torch is 2.0, not "),
        ("software", "Lockstep's source", "abc", "Lockstep's source is abc, not "),
        (
            "configuration",
            "optim.lr",
            0.2,
            "configuration differs from worker 0's: optim.lr is 0.2, not 0.1 (worker 2 is on",
        ),
        ("configuration", "optim.lr_milestones", [0.4], "optim.lr_milestones[1] is missing, not 0.8"),
        ("data", "number of training samples", 9, "number of training samples is 9, not 1437"),
        ("data", "number of validation samples", 9, "number of validation samples is 9, not 360"),
        ("data", "classes", [*"012345678", "X"], "classes[9] is X, not 9"),
        ("data", "digest of training labels", "abc", "digest of training labels is abc, not "),
        ("model", "weight", "of shape [3, 4]", "model differs from worker 0's: weight of shape [3, 4] instead of"),
    ],
)
def test_each_kind_of_difference_is_named_with_both_values(part: str, name: str, value: Any, words: str) -> None:
    theirs = {**OWN, part: {**OWN[part], name: value}}
    assert name in OWN[part]
    said = _said(theirs)
    assert words in said
    assert "worker 0 on a); " in said


def test_a_missing_tensor_is_named() -> None:
    assert "nothing instead of bias of shape [2]" in _said({**OWN, "model": {"weight": "of shape [2, 4]"}})


@pytest.mark.parametrize(
    "own",
    [
        {"device": "cpu"},
        {"data_dir": Path("/scratch/other")},
        {"loader_workers": 3},
        {"run_dir": Path("/scratch/run"), "keep": 9, "track": ()},
        {"resume": "auto"},
        {"time_limit": "1:00:00"},
    ],
)
def test_what_belongs_to_a_worker_is_not_compared(own: dict[str, Any]) -> None:
    others = configure(lr=0.1, batch_size=8, lr_milestones=(0.4, 0.8), **own)
    assert _said(describe_job(others, DATA, MODEL)) == ""


def _memory(data: ImageData, **changed: Any) -> ImageData:
    return dataclasses.replace(data, train=dataclasses.replace(data.train, **changed))


def test_the_content_of_images_in_memory_counts() -> None:
    labels = DATA.train.labels.clone()
    labels[700] = (labels[700] + 1) % 10
    assert "training labels" in _said(describe_job(CONFIG, _memory(DATA, labels=labels), MODEL))
    images = DATA.train.images.clone()
    images[-1] += 1
    assert "training images" in _said(describe_job(CONFIG, _memory(DATA, images=images), MODEL))


def test_a_folder_is_known_by_its_files_not_by_its_place(tmp_path: Path) -> None:
    def folder(place: str, content: bytes) -> ImageData:
        path = tmp_path / place / "train" / "cat" / "1.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        split = FileSplit([path], [0])
        return ImageData(str(tmp_path / place), ("cat",), split, split, InputSpec(1, 2, 2, (0.0,), (1.0,)))

    def described(place: str, content: bytes) -> Any:
        return describe_job(configure(batch_size=8), folder(place, content), MODEL)

    first = described("here", b"12")
    assert _said(described("there", b"34"), first) == ""
    assert "training files' names and sizes" in _said(described("elsewhere", b"123"), first)


def test_files_that_cannot_be_read_are_left_for_training_to_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("link.png")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", MAX_IMAGE_BYTES + 1)
    paths = sorted(tmp_path.iterdir())
    split = FileSplit(paths, [0] * len(paths))
    data = ImageData(str(tmp_path), ("cat",), split, split, InputSpec(1, 2, 2, (0.0,), (1.0,)))
    own = describe_job(configure(batch_size=8), data, MODEL)
    assert _said(own, own) == ""


def test_decoded_images_are_identified_by_their_files(tmp_path: Path) -> None:
    path = tmp_path / "cat" / "1.jpg"
    path.parent.mkdir()
    path.write_bytes(b"12")
    images, (mean,) = DATA.train.images, DATA.input.mean

    def described(brighter: int) -> Any:
        spec = dataclasses.replace(DATA.input, mean=(mean + brighter * 1e-9,))
        data = dataclasses.replace(_memory(DATA, images=images + brighter, source=FileSplit([path], [0])), input=spec)
        return describe_job(CONFIG, data, MODEL)

    first = described(0)
    assert _said(described(1), first) == ""
    assert list(first)[-3:] == ["decoders", "data", "model"]
    said = _said({**first, "decoders": {**first["decoders"], "Pillow": "9.1"}}, first)
    assert "decoders differs from worker 0's: Pillow is 9.1, not " in said
    assert said.endswith("; install the same on both")
    path.write_bytes(b"123")
    assert "training files' names and sizes" in _said(described(0), first)


def test_patch_releases_and_missing_metadata_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            raise PackageNotFoundError(name)
        return "2.11.3+cpu"

    monkeypatch.setattr(checks, "version", version)
    software = describe_job(CONFIG)["software"]
    assert (software["torch"], software["torchvision"], software["numpy"]) == ("2.11.3", "2.11", "none")


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_state_without_tensors_is_described() -> None:
    assert describe_job(CONFIG, model=Extra(1, 1))["model"]["_extra_state"] == "of type dict"
    lazy = nn.Sequential(nn.LazyLinear(2))
    assert "of type" in describe_job(CONFIG, model=lazy)["model"]["0.weight"]
    with pytest.raises(ConfigError, match=r"the model's 0.weight is lazy and has no shape yet"):
        check_same_job(World(RankInfo(), torch.device("cpu")), CONFIG, DATA, lazy)


def test_a_users_own_share_of_the_data_is_found() -> None:
    def described(labels: list[int]) -> Any:
        data = TensorDataset(torch.zeros(len(labels), 1, 2, 2), torch.tensor(labels))
        return describe_job(CONFIG, users_data("mine", data, TensorDataset(*data[:1])), MODEL)

    assert "training first and last label is [1, 2], not [0, 2]" in _said(described([1, 1, 2]), described([0, 1, 2]))


def test_the_file_of_a_users_function_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mymodel.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text("def build(num_classes): ...\n")
    __import__("mymodel")
    config = configure(arch="mymodel:build")
    first = describe_job(config, DATA, MODEL)
    file.write_text("def build(num_classes): return None\n")
    assert "worker 2's code differs from worker 0's: --model's module mymodel is" in _said(
        describe_job(config, DATA, MODEL), first
    )


def _data(samples: int) -> ImageData:
    split = MemorySplit(torch.zeros(samples, 3, 4, 4, dtype=torch.uint8), torch.zeros(samples, dtype=torch.int64))
    return ImageData("blank", ("a", "b", "c"), split, split, InputSpec(3, 4, 4, (0.0,) * 3, (1.0,) * 3))


def _check(samples: int, workers: int, model: str = "batch norm", **settings: Any) -> None:
    check_training(configure(arch="mine", **settings), NORMS[model](), _data(samples), workers)


@pytest.mark.parametrize(
    ("samples", "workers", "settings"),
    [
        pytest.param(9, 1, {"batch_size": 4}, id="the last batch"),
        pytest.param(11, 2, {"batch_size": 4}, id="a share of the last batch"),
        pytest.param(9, 2, {"batch_size": 4}, id="an empty share, which gets a filler"),
        pytest.param(10, 1, {"batch_size": 2, "accumulate": 4}, id="a pass of the last batch"),
        pytest.param(9, 1, {"global_batch_size": 8}, id="a global batch"),
    ],
)
def test_one_image_in_the_last_step_is_refused_with_a_fix(samples: int, workers: int, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mine cannot train .*, but the last step .*; add --drop-last, or change"):
        _check(samples, workers, **settings)
    _check(samples, workers, drop_last=True, **settings)
    _check(samples, workers, max_steps=1, **settings)
    _check(samples, workers, freeze=["2"], **settings)
    for model in NORMS.keys() - {"batch norm"}:
        _check(samples, workers, model, **settings)
    if workers > 1:
        _check(samples, workers, sync_bn=True, strategy="ddp", **settings)


@pytest.mark.parametrize(
    ("samples", "workers", "settings"),
    [
        pytest.param(8, 1, {"batch_size": 1}, id="batches of one"),
        pytest.param(8, 4, {"global_batch_size": 4, "drop_last": True}, id="a global batch of one each"),
        pytest.param(5, 4, {"batch_size": 8}, id="a small set"),
    ],
)
def test_one_image_in_each_step_is_refused_with_a_fix(samples: int, workers: int, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"but a step leaves a worker one: .*; change --batch-size"):
        _check(samples, workers, **settings)


@pytest.mark.parametrize(
    ("samples", "workers", "settings"),
    [(10, 1, {"batch_size": 4}), (12, 2, {"batch_size": 4}), (8, 1, {"batch_size": 4})],
)
def test_two_images_are_enough(samples: int, workers: int, settings: dict[str, Any]) -> None:
    _check(samples, workers, **settings)


class Auxiliary(nn.Module):
    """Returns another form in training mode than in evaluation mode."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.form, self.layers = form, nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3))

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.layers(images)
        return self.form(logits) if self.training else logits


@pytest.mark.parametrize(
    ("form", "got"),
    [
        (lambda logits: (logits, logits), "a tuple"),
        (lambda logits: SimpleNamespace(logits=logits), "a SimpleNamespace"),
        (lambda logits: {"logits": logits}, "a dict"),
        (lambda logits: torch.cat([logits, logits]), r"a tensor of shape \[4, 3\]"),
        (lambda logits: logits[:, 0], r"a tensor of shape \[2\]"),
        (lambda logits: logits[:, :2], r"a tensor of shape \[2, 2\]"),
    ],
    ids=["tuple", "object", "dict", "twice the rows", "one column", "too few columns"],
)
def test_other_outputs_in_training_mode_are_refused(form: Callable[[torch.Tensor], Any], got: str) -> None:
    model = Auxiliary(form)
    before = copy.deepcopy(model.state_dict())
    check_model("mine", model, _data(8))
    with pytest.raises(ConfigError, match=rf"mine:Net returned {got} for two images in training mode; return logits"):
        check_training(configure(arch="mine:Net"), model, _data(8), 1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_that_needs_more_than_two_images_is_not_refused() -> None:
    model = Auxiliary(lambda logits: logits.view(4, -1, 3).flatten(0, 1))
    check_training(configure(arch="mine:Net", batch_size=4), model, _data(8), 1)


@pytest.mark.parametrize("track", [True, False])
def test_a_norm_of_batch_statistics_alone_needs_two_images(track: bool) -> None:
    layers = nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3, track_running_stats=track)
    check_model("mine", nn.Sequential(*layers), _data(8))
    with pytest.raises(ConfigError, match=r"mine returned a tensor of shape \[., 2\] for (one image|two images), but"):
        check_model("mine", nn.Sequential(*layers, nn.Linear(3, 2)), _data(8))
    with pytest.raises(ConfigError, match=r"cannot take images of shape \[3, 4, 4\]: .*mat1 and mat2 .*hint"):
        check_model("mine", nn.Sequential(*layers, nn.Linear(4, 3)), _data(8), "; hint")
    config = configure(arch="mine:Net", batch_size=4, drop_last=True)
    check_training(config, nn.Sequential(*layers), _data(8), 1)
    with pytest.raises(ConfigError, match="9 images in batches of 4") if not track else nullcontext():
        check_training(config, nn.Sequential(*layers), _data(9), 1)


def test_network_of_batch_statistics_evaluates_no_single_image() -> None:
    layers = nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3, track_running_stats=False)
    network = inference.LoadedNetwork(nn.Sequential(*layers), ("a", "b", "c"), _data(9).input, "")
    world: Any = SimpleNamespace(size=1, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"the network cannot evaluate one image .* 9 images in batches of 4"):
        inference.evaluate_network(configure(batch_size=4), world, network, _data(9))
    with pytest.raises(ConfigError, match=r"the network cannot take one image .*; use `lockstep eval` with -b 2"):
        next(inference.predict(network, [Path("x.png")], 1))


def test_buffers_count_only_where_all_workers_share_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in equal_tensors(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [name for name, _ in equal_tensors(synchronized)][4:] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_a_step_that_comes_again_is_compared_again() -> None:
    compared: list[torch.Tensor] = []

    class Alone:
        size = 2

        def max_(self, numbers: torch.Tensor) -> torch.Tensor:
            compared.append(numbers)
            return numbers

    world: Any = Alone()
    check = ReplicaCheck(world, nn.Linear(2, 2), every=1)
    check.check(100)
    check.check(100)
    assert len(compared) == 1
