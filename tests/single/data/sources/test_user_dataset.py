"""The user's own data sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.data.sets import UserSplit
from lockstep.data.sources.user_dataset import describe
from lockstep.errors import DataError

IMAGE = torch.zeros(3, 4, 6)


def test_the_form_is_read_from_the_first_item_and_the_classes_from_the_labels() -> None:
    train = TensorDataset(torch.rand(5, 2, 6, 7), torch.tensor([0, 3, 1, 0, 0]))
    val = [(torch.rand(2, 6, 7), 4), (torch.rand(2, 6, 7), 1)]
    data = describe("mine", train, val)
    assert isinstance(data.train, UserSplit)
    assert isinstance(data.val, UserSplit)
    assert (data.name, len(data.train), len(data.val)) == ("mine", 5, 2)
    assert (data.input.channels, data.input.height, data.input.width) == (2, 6, 7)
    assert (data.input.mean, data.input.std) == ((0.0, 0.0), (1.0, 1.0))
    assert data.classes == ("0", "1", "2", "3", "4")


def test_classes_that_the_set_names_are_taken_without_reading_every_label() -> None:
    class Named(list[Any]):
        classes = ("cat", "dog")

        def __getitem__(self, index: Any) -> Any:
            assert index == 0
            return super().__getitem__(index)

    assert describe("mine", Named([(IMAGE, 1)] * 9), [(IMAGE, 0)]).classes == ("cat", "dog")


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(IMAGE, 0)])


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        pytest.param(_Stream(), [(IMAGE, 0)], "training set needs __len__", id="no length"),
        pytest.param([(IMAGE, 0)], iter([(IMAGE, 0)]), "validation set needs __len__", id="an iterator"),
        pytest.param([], [(IMAGE, 0)], "training set is empty", id="no training"),
        pytest.param([(IMAGE, 0)], [], "validation set is empty", id="no validation"),
        pytest.param([IMAGE], [(IMAGE, 0)], "items must be", id="no label"),
        pytest.param([(IMAGE, 0, "extra")], [(IMAGE, 0)], "items must be", id="three parts"),
        pytest.param([(IMAGE.numpy(), 0)], [(IMAGE, 0)], "items must be", id="an array"),
        pytest.param([(IMAGE[0], 0)], [(IMAGE, 0)], "items must be", id="no channels"),
        pytest.param([(IMAGE, "cat")], [(IMAGE, "cat")], "label", id="a word as label"),
        pytest.param([(IMAGE, 0)], [(IMAGE, "cat")], "label", id="a word as label in validation"),
        pytest.param([(IMAGE, 0)], [IMAGE], "items must be", id="no label in validation"),
        pytest.param([(IMAGE, 0), (IMAGE,)], [(IMAGE, 0)], "items must be", id="no label later"),
    ],
)
def test_sets_of_another_form_are_refused(train: Any, val: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"mine.*{words}"):
        describe("mine", train, val)
