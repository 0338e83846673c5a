"""The user's own data sets."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.data.sets import UserSplit, class_index, describe_custom
from lockstep.errors import DataError

IMAGE = torch.zeros(3, 4, 6)


def test_first_item_gives_the_form_and_labels_the_classes() -> None:
    train = TensorDataset(torch.rand(5, 2, 6, 7), torch.tensor([0, 3, 1, 0, 0]))
    val = [(torch.rand(2, 6, 7), 4), (torch.rand(2, 6, 7), 1)]
    data = describe_custom("mine", train, val)
    assert isinstance(data.train, UserSplit)
    assert isinstance(data.val, UserSplit)
    assert (data.name, len(data.train), len(data.val)) == ("mine", 5, 2)
    assert (data.input.channels, data.input.height, data.input.width) == (2, 6, 7)
    assert (data.input.mean, data.input.std) == ((0.0, 0.0), (1.0, 1.0))
    assert data.classes == ("0", "1", "2", "3", "4")


class _Named(list[Any]):
    classes = ("cat", "dog")


def test_classes_named_by_the_set_need_no_reading_of_labels() -> None:
    class FirstOnly(_Named):
        def __getitem__(self, index: Any) -> Any:
            assert index == 0
            return super().__getitem__(index)

    assert describe_custom("mine", FirstOnly([(IMAGE, 1)] * 9), [(IMAGE, 0)]).classes == ("cat", "dog")


@pytest.mark.parametrize(
    "label",
    [1, True, 1.0, np.int8(1), np.uint64(1), np.bool_(True), np.array(1), np.float32(1), torch.tensor(1),
     torch.tensor([1]), torch.tensor(1, dtype=torch.uint8), torch.tensor(True), Fraction(1)],
)  # fmt: skip
def test_labels_may_have_any_type_of_number(label: Any) -> None:
    assert class_index(label, 2) == 1
    assert describe_custom("mine", _Named([(IMAGE, label)]), [(IMAGE, label)]).classes == ("cat", "dog")


@pytest.mark.parametrize(
    "label",
    [0.3, -1, -100, 2, 10**30, math.nan, math.inf, "1", b"1", None, 1j, [1], np.float32(0.5), np.array([0, 1]),
     torch.tensor(0.5), torch.tensor([0.0, 1.0]), torch.tensor(math.nan), torch.tensor(-1), torch.zeros(9, 9)],
    ids=str,
)  # fmt: skip
def test_labels_that_are_not_classes_are_refused_in_one_line(label: Any) -> None:
    with pytest.raises(DataError) as caught:
        describe_custom("mine", _Named([(IMAGE, 0)]), [(IMAGE, label)])
    start, end = "mine: item 0 of the validation set has label ", ": must be an integer from 0 to 1"
    text = str(caught.value)
    assert text.startswith(start)
    assert text.endswith(end)
    assert "\n" not in text


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
        pytest.param([(IMAGE, 0, "extra")], [(IMAGE, 0)], r"is \(a tensor \[.+\], int, str\); to", id="three parts"),
        pytest.param(
            [{"image": IMAGE, "label": 0}], [(IMAGE, 0)], "is a dict with the keys 'image', 'label'; to", id="dict"
        ),
        pytest.param([(IMAGE.numpy(), 0)], [(IMAGE, 0)], "items must be", id="an array"),
        pytest.param([(IMAGE[0], 0)], [(IMAGE, 0)], "items must be", id="no channels"),
        pytest.param([(IMAGE, 0)], [(IMAGE, "cat")], "item 0 of the validation set has label 'cat'", id="a word"),
        pytest.param([(IMAGE, 0), (IMAGE, -1)], [(IMAGE, 0)], "item 1 of the training set has label -1", id="ignored"),
        pytest.param([(IMAGE, 2**40)], [(IMAGE, 0)], "0 to 1,048,575", id="a large number as label"),
        pytest.param([(IMAGE, 0)], [IMAGE], "items must be", id="no label in validation"),
        pytest.param([(IMAGE, 0), (IMAGE,)], [(IMAGE, 0)], "items must be", id="no label later"),
    ],
)
def test_sets_of_another_form_are_refused(train: Any, val: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"mine.*{words}"):
        describe_custom("mine", train, val)
