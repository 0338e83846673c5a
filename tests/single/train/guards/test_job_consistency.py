"""What workers must have in common before they begin."""

from __future__ import annotations

import copy
import dataclasses
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data.sets import MOST_IMAGE_BYTES, FileSplit, ImageData, InputSpec, MemorySplit
from lockstep.data.sources import digits
from lockstep.data.sources.user_dataset import describe as users_data
from lockstep.errors import ConfigError
from lockstep.train.fit import configure
from lockstep.train.guards import job_consistency
from lockstep.train.guards.job_consistency import check_same_job, describe_job, difference
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

CONFIG = configure(lr=0.1, batch_size=8, progressive_sizes=("0:4", "2:8"))
DATA = digits.load()
MODEL = nn.Linear(4, 2)
OWN = describe_job(CONFIG, DATA, MODEL)


def _said(theirs: Any, ours: Any = OWN) -> str:
    return difference(["a", "b", "c"], [ours, copy.deepcopy(ours), theirs])


def test_equal_workers_have_no_difference() -> None:
    assert _said(copy.deepcopy(OWN)) == ""


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
        ("configuration", "data.progressive_sizes", ["0:4"], "data.progressive_sizes[1] is missing, not 2:8"),
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
    others = configure(lr=0.1, batch_size=8, progressive_sizes=("0:4", "2:8"), **own)
    assert _said(describe_job(others, DATA, MODEL)) == ""


def _memory(data: ImageData, **changed: Any) -> ImageData:
    return dataclasses.replace(data, train=dataclasses.replace(data.train, **changed))


def test_the_content_of_images_in_memory_counts() -> None:
    assert isinstance(DATA.train, MemorySplit)
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
    os.truncate(tmp_path / "large.png", MOST_IMAGE_BYTES + 1)
    paths = sorted(tmp_path.iterdir())
    split = FileSplit(paths, [0] * len(paths))
    data = ImageData(str(tmp_path), ("cat",), split, split, InputSpec(1, 2, 2, (0.0,), (1.0,)))
    own = describe_job(configure(batch_size=8), data, MODEL)
    assert _said(own, own) == ""


def test_decoded_images_are_known_by_their_files_and_decoders_come_first(tmp_path: Path) -> None:
    path = tmp_path / "cat" / "1.jpg"
    path.parent.mkdir()
    path.write_bytes(b"12")
    assert isinstance(DATA.train, MemorySplit)
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

    monkeypatch.setattr(job_consistency, "version", version)
    software = describe_job(CONFIG)["software"]
    assert (software["torch"], software["torchvision"], software["numpy"]) == ("2.11.3", "2.11", "none")


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_state_that_is_no_tensor_is_described_and_a_lazy_one_is_refused() -> None:
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
