"""The catalog: from a name, a folder or a function to a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.schema import DataConfig
from lockstep.data import catalog
from lockstep.errors import ConfigError, DataError

MODULE = """
from lockstep.data.sources import digits

def pairs():
    import torch
    image = torch.zeros(3, 4, 5)
    return [(image, 0), (image, 2)], [(image, 1)]

def whole():
    return digits.load()

def one():
    return pairs()[0]

def three():
    return 1, 2, 3

def damaged():
    return [], []
"""


@pytest.fixture
def my_module(new_module: Callable[[str, str], None]) -> str:
    """The name of a module of the user's own in the current folder."""
    new_module("my_data_module", MODULE)
    return "my_data_module"


def test_without_a_name_it_is_the_digits() -> None:
    assert catalog.load(DataConfig()).name == "digits"
    assert len(catalog.load(DataConfig(dataset="digits")).train) == 1437


def test_synthetic_images_have_the_size_asked_for() -> None:
    data = catalog.load(DataConfig(dataset="synthetic", image_size=16))
    assert data.train.images.shape == (1024, 3, 16, 16)
    assert (len(data.val), len(data.classes)) == (256, 1000)
    assert (data.input.height, data.input.width) == (16, 16)
    assert 0 <= int(data.train.labels.min()) <= int(data.train.labels.max()) < 1000


def test_synthetic_images_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(DataError, match=r"--image-size 1000000: synthetic images of .* need 3,840,000 GB of memory"):
        catalog.load(DataConfig(dataset="synthetic", image_size=1_000_000))


def test_folder_loads_by_path_and_imagenet_from_the_data_folder(folder: Path) -> None:
    assert catalog.load(DataConfig(dataset=str(folder))).classes == ("blue", "red")
    folder.rename(folder.parent / "imagenet")
    assert catalog.load(DataConfig(dataset="imagenet", data_dir=folder.parent)).classes == ("blue", "red")


UNKNOWN = [
    ({"dataset": "cifar-10"}, "'cifar-10' is not a known data set or folder; did you mean cifar10"),
    ({"dataset": "fashionmnist"}, "did you mean fashion-mnist"),
    ({"dataset": "photos"}, "known data sets: digits, mnist"),
    ({"dataset": "photos/of/nothing"}, "photos/of/nothing does not exist"),
    ({"dataset": __file__}, "is a file; pass the folder that contains train/ and val/"),
    ({"dataset": "imagenet"}, "imagenet does not exist; ImageNet cannot be downloaded"),
]


@pytest.mark.parametrize(("settings", "words"), UNKNOWN)
def test_an_unknown_name_is_refused_when_loading_and_before(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    config = DataConfig(data_dir=tmp_path, **settings)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=words):
        catalog.load(config)
    with pytest.raises(DataError, match=words):
        catalog.check(config)


def test_what_can_exist_passes_the_check_unread(tmp_path: Path, folder: Path) -> None:
    for config in (
        DataConfig(),
        DataConfig(dataset="cifar100", data_dir=tmp_path / "not there yet"),
        DataConfig(dataset="synthetic"),
        DataConfig(dataset=str(folder)),
        DataConfig(data="no_such_module:load"),
    ):
        catalog.check(config)


def test_the_users_function_gives_two_sets_or_all_of_it(my_module: str) -> None:
    data = catalog.load(DataConfig(data=f"{my_module}:pairs"))
    assert (len(data.train), len(data.val), data.classes) == (2, 1, ("0", "1", "2"))
    assert (data.input.channels, data.input.height, data.input.width) == (3, 4, 5)
    assert catalog.load(DataConfig(data=f"{my_module}:whole")).name == "digits"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("one", "must return .training set, validation set."),
        ("three", "must return .training set, validation set."),
        ("damaged", "the training set is empty"),
    ],
)
def test_a_function_that_returns_something_else_is_named(my_module: str, function: str, words: str) -> None:
    with pytest.raises(DataError, match=f"{my_module}:{function}.*{words}"):
        catalog.load(DataConfig(data=f"{my_module}:{function}"))


def test_a_function_that_is_not_there_is_named(my_module: str) -> None:
    with pytest.raises(ConfigError, match=f"--data {my_module}:nothing.*no function 'nothing'"):
        catalog.load(DataConfig(data=f"{my_module}:nothing"))
