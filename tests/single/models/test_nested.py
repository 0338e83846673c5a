"""Functions of nested tensors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from lockstep.models.nested import cast, leaves, map_tensors

Pair = namedtuple("Pair", "first second")
ONE, TWO = torch.ones(2), torch.arange(2)


@pytest.mark.parametrize(
    "value",
    [ONE, {"a": ONE, "b": [TWO, None]}, OrderedDict(a=ONE), (ONE, (TWO, "text")), Pair(ONE, TWO), []],
    ids=lambda value: type(value).__name__,
)
def test_mapping_tensors_keeps_types_and_other_objects(value: Any) -> None:
    found = list(leaves(value))
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped) is type(value)
    for before, same, after in zip(found, leaves(value), leaves(mapped), strict=True):
        assert same is before
        if isinstance(before, torch.Tensor):
            assert torch.equal(after, before + 1)
        else:
            assert after is before


def test_cast_changes_floating_point_alone() -> None:
    mapped = cast({"logits": ONE, "more": (TWO, ONE > 0)}, torch.float64)
    assert [leaf.dtype for leaf in leaves(mapped)] == [torch.float64, torch.int64, torch.bool]
