"""The user's own data sets."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.data.sets import class_index, describe_custom
from lockstep.errors import ConfigError, DataError

IMAGE = torch.zeros(3, 4, 6)


def test_first_item_gives_the_form_and_labels_the_classes() -> None:
    train = TensorDataset(torch.rand(5, 2, 6, 7), torch.tensor([0, 3, 1, 0, 0]))
    val = [(torch.rand(2, 6, 7), 4), (torch.rand(2, 6, 7), 1)]
    data = describe_custom("mine", train, val)
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
        pytest.param(
            [(IMAGE, 0, "extra")],
            [(IMAGE, 0)],
            r"is \(a tensor \[.+\], int, str\) \(an item is not a pair\); to",
            id="three parts",
        ),
        pytest.param(
            [{"image": IMAGE, "label": 0}],
            [(IMAGE, 0)],
            r"is a dict with the keys 'image', 'label' \(.+\); to",
            id="dict",
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


TOKENS = torch.arange(6)


@pytest.mark.parametrize(
    ("item", "shape", "classes"),
    [
        pytest.param((IMAGE, 1), (3, 4, 6), 2, id="an image and a class"),
        pytest.param((IMAGE.byte(), torch.tensor(1)), (3, 4, 6), 2, id="bytes and a class"),
        pytest.param((TOKENS, np.int8(1)), (0, 0, 0), 2, id="tokens and a class"),
        pytest.param((IMAGE.long(), True), (0, 0, 0), 2, id="integers of an image's shape"),
        pytest.param(({"ids": TOKENS, "mask": [TOKENS]}, 1), (0, 0, 0), 2, id="nested inputs"),
        pytest.param((IMAGE, IMAGE[0].long()), (3, 4, 6), 0, id="a mask"),
        pytest.param((TOKENS, TOKENS), (0, 0, 0), 0, id="the next tokens"),
        pytest.param((TOKENS, 1.0), (0, 0, 0), 0, id="a whole float"),
        pytest.param((TOKENS, torch.tensor(1.0)), (0, 0, 0), 0, id="a whole float in a tensor"),
        pytest.param((TOKENS, torch.tensor([1])), (0, 0, 0), 0, id="a row of one integer"),
        pytest.param((TOKENS, {"a": 1, "b": 0.5}), (0, 0, 0), 0, id="several targets"),
    ],
)
def test_first_item_gives_the_kinds_of_inputs_and_targets(item: Any, shape: tuple[int, ...], classes: int) -> None:
    data = describe_custom("mine", [item], [item], has_loss=True)
    assert (data.input.channels, data.input.height, data.input.width) == shape
    assert data.has_images == (sum(shape) > 0)
    assert len(data.classes) == classes
    assert data.train.classes == data.val.classes == classes


@pytest.mark.parametrize("target", [0.5, -1, TOKENS, torch.tensor(0.5)], ids=str)
def test_targets_that_are_not_classes_need_a_loss(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"item 0 of the training set has label .* need loss=, a function of"):
        describe_custom("mine", [(TOKENS, target)], [(TOKENS, 0)], has_loss=False)


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        pytest.param([TOKENS], [(TOKENS, 0)], r"tensor \[6\] \(an item is not a pair\)", id="no target"),
        pytest.param([("text", 0)], [(TOKENS, 0)], "found str instead of a tensor", id="text"),
        pytest.param([(TOKENS, "cat")], [(TOKENS, 0)], "found str instead of a tensor", id="a word as target"),
        pytest.param([(object(), 0)], [(TOKENS, 0)], r"training set is \(object, int\) \(default_collate", id="object"),
        pytest.param([(TOKENS, 0.5)], [(TOKENS, None)], "item 0 of the validation set", id="no target in validation"),
        pytest.param([(TOKENS, 0), (TOKENS, 0.5)], [(TOKENS, 0)], "item 1 of the training set has label 0.5", id="mix"),
    ],
)
def test_items_that_are_not_tensors_are_refused(train: Any, val: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"mine.*{words}"):
        describe_custom("mine", train, val, has_loss=True)


def _padded(items: list[dict[str, Any]]) -> tuple[Any, Any]:
    rows = torch.nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return rows, torch.tensor([item["label"] for item in items])


def test_collate_function_makes_pairs_of_any_items() -> None:
    items = [{"ids": TOKENS[:size], "label": size % 3} for size in (6, 2, 5)]
    data = describe_custom("mine", items, items[:1], has_loss=False, collate=_padded)
    assert data.classes == ("0", "1", "2")
    inputs, targets = data.train.batch_of(items)
    assert inputs.shape == (3, 6)
    assert targets.tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda items: (torch.zeros(2, 3), torch.zeros(1)), r"shape \[2, 3\] is not a batch of 1"),
        (len, r"collate_fn= returned int, not \(inputs, targets\)"),
    ],
)
def test_what_a_collate_function_returns_is_checked(collate: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"mine: items must be.*{words}"):
        describe_custom("mine", [TOKENS], [TOKENS], has_loss=True, collate=collate)
