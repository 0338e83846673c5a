"""An optimizer's state is loaded with the dtypes with which it was saved."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import pytest
import torch
from wide_optimizer import WideOptimizer

from lockstep.models.optimizer_state import load_keeping_flags, load_optimizer_state


def _trained(steps: int) -> tuple[torch.nn.Linear, WideOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = WideOptimizer(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    return model, optimizer


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.view(torch.uint8).tolist() if value.ndim else value.item()
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    return [_bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_all_kinds_of_state_stay_as_saved() -> None:
    _, optimizer = _trained(3)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    _, torchs = _trained(0)
    torchs.load_state_dict(state)
    assert torchs.state_dict()["state"][0]["momentum"].dtype is torch.bfloat16
    for steps in (0, 2):
        _, other = _trained(steps)
        load_optimizer_state(other, state)
        assert _bits(other.state_dict()) == _bits(state)


@pytest.mark.parametrize(("kept", "settings"), [(None, (0.5, 0.1)), (["weight_decay"], (7.0, 0.1)), ([], (7.0, 0.2))])
def test_settings_of_this_session_are_kept(kept: Collection[str] | None, settings: tuple[float, float]) -> None:
    model = torch.nn.Linear(3, 2)
    saved = torch.optim.SGD(model.parameters(), lr=7.0, weight_decay=0.2).state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    load_keeping_flags(optimizer, saved, kept)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == settings


def test_loaded_tensors_are_copies() -> None:
    _, optimizer = _trained(1)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state["state"])
    model, other = _trained(0)
    load_optimizer_state(other, state)
    other.zero_grad()
    model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum().backward()
    other.step()
    assert torch.equal(state["state"][0]["momentum"], before[0]["momentum"])


def test_state_in_another_form_is_left_to_the_optimizer() -> None:
    class Packed(WideOptimizer):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            for state in self.state.values():
                state["momentum"] = state["momentum"].flatten()

    _, optimizer = _trained(1)
    model = torch.nn.Linear(3, 2).bfloat16()
    packed = Packed(model.parameters())
    load_optimizer_state(packed, optimizer.state_dict())
    assert packed.state[model.weight]["momentum"].shape == (6,)


def test_parameters_without_state_and_devices_that_are_not_kept() -> None:
    _, optimizer = _trained(1)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][1]
    model, other = _trained(0)
    load_optimizer_state(other, state, keep_devices=False)
    assert other.state[model.weight]["momentum"].dtype is torch.float32
    assert model.bias not in other.state
