"""The moving average of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.train.optim.ema import MovingAverage

DECAY = 0.9


def _net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)).to(dtype)


def _change(net: nn.Module) -> None:
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(1) if tensor.dtype == torch.int64 else tensor.add_(
                torch.randn(tensor.shape, dtype=tensor.dtype)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_average_is_torchs_to_the_bit_and_counts_are_copied(dtype: torch.dtype) -> None:
    net = _net(dtype)
    ours = MovingAverage(net, DECAY)
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    for _ in range(4):
        _change(net)
        ours.update()
        theirs.update_parameters(net)
    expected = theirs.state_dict() | {"module.1.num_batches_tracked": net[1].num_batches_tracked}
    assert ours.state_dict().keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in ours.state_dict().items())


def test_a_restored_average_goes_on_alike() -> None:
    net = _net(torch.float32)
    first, second = MovingAverage(net, DECAY), MovingAverage(net, DECAY)
    _change(net)
    first.update()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    _change(net)
    for average in (first, second):
        average.update()
    assert all(tensor.equal(second.state_dict()[name]) for name, tensor in first.state_dict().items())
