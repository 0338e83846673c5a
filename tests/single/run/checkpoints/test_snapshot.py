"""States as JSON values and tensors."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from lockstep.run.checkpoints.snapshot import join_state, split_state

STATES = [
    {"state": {0: {"exp_avg": torch.ones(2), "step": 3}}, "param_groups": [{"betas": (0.9, 0.999), "params": [0]}]},
    {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    {"tuple": [1]},
    {"pairs": {"tensor of this name": "x"}},
    Counter({3: 1, 5: 2}),
    [None, True, float("inf"), (), {}, "text"],
]


@pytest.mark.parametrize("state", STATES)
def test_states_come_back(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    values = json.loads(json.dumps(split_state(state, "", tensors)))
    again: dict[str, torch.Tensor] = {}
    assert split_state(join_state(values, tensors), "", again) == split_state(state, "", {})
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_names_say_where_a_tensor_is() -> None:
    tensors: dict[str, torch.Tensor] = {}
    split_state({"state": {0: {"exp_avg": torch.ones(2)}}, "more": [torch.ones(1)]}, "optimizer", tensors)
    assert list(tensors) == ["optimizer.state.0.exp_avg", "optimizer.more.0"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [{"b": {1, 2}}]}, "x.a.0.b is a set"),
        ({"hook": print}, "x.hook is a builtin_function_or_method"),
        ({(1, 2): 3}, "a key of x is a tuple"),
    ],
)
def test_what_is_neither_is_named(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        split_state(state, "x", {})
