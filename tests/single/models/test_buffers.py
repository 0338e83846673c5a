"""Buffers that are put back: their values, and which tensors they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models.buffers import Buffers, load_state


class Rebinding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("last", None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1  # another tensor
        self.last = images
        return images


def test_buffers_are_put_back_although_a_module_rebinds_them() -> None:
    module, buffers = Rebinding(), Buffers()
    for value in (1, 2):  # what is kept at the second time is the tensor of then
        module(torch.zeros(1))
        module.last = None
        buffers.keep(module)
        kept = module.count
        module(torch.zeros(1))
        kept.fill_(9)
        buffers.put_back()
        assert module.count is kept
        assert module.count.tolist() == [value] * 2
        assert module.last is None


def _made_in_evaluation() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("before", "row"),
    [
        (torch.full((3,), torch.nan), 0),
        (torch.zeros(1, 3).expand(2, 3), 0),
        (torch.full((1, 3), torch.nan).expand(2, 3), 0),
        (torch.zeros(5).as_strided((3, 3), (1, 1)), 0),
        (torch.zeros(2, 3).T, 0),
        (torch.zeros(3).expand(0, 3), slice(0)),
        (torch.zeros(()), ...),
        (_made_in_evaluation(), 0),
    ],
)
def test_buffers_of_any_layout_are_put_back(before: torch.Tensor, row: Any) -> None:
    module, buffers = nn.Module(), Buffers()
    module.register_buffer("any", before)
    expected = before.clone()
    buffers.keep(module)
    with torch.inference_mode():
        before[row] = 7
    buffers.put_back()
    torch.testing.assert_close(before, expected, rtol=0, atol=0, equal_nan=True)


class Expanded(nn.Module):
    """Two expanded buffers, one of them of another buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("row", torch.full((1, 3), value))
        self.register_buffer("rows", self.row.expand(2, 3))
        self.register_buffer("all", torch.tensor(value).expand(4))


def test_expanded_buffers_are_loaded_and_stay_expanded() -> None:
    module = Expanded(1.0)
    load_state(module, {name: tensor.clone() for name, tensor in Expanded(5.0).state_dict().items()})
    assert all(bool((buffer == 5).all()) for buffer in module.buffers())
    module.row.fill_(7)
    assert bool((module.rows == 7).all())


@pytest.mark.parametrize(
    "wrong", [{"all": torch.arange(4.0)}, {"all": torch.ones(3)}, {"row": torch.ones(2)}, {"x": 1}]
)
def test_states_that_do_not_fit_expanded_buffers_are_refused(wrong: dict[str, Any]) -> None:
    module = Expanded(1.0)
    with pytest.raises(RuntimeError):
        load_state(module, {**Expanded(5.0).state_dict(), **wrong})


def test_sparse_buffers_are_put_back() -> None:
    module, buffers = nn.Module(), Buffers()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    buffers.keep(module)
    module.sparse.mul_(2)
    buffers.put_back()
    assert torch.equal(module.sparse.to_dense(), torch.eye(3))
