"""With three workers, where the order of a sum shows in its last bits: runs give the same bits however timing falls."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from gradients import backward, bits, gradient, grads, new_parameters
from worker_group import on_hvd_workers

from lockstep import hvd
from lockstep.hvd.compression import Compressor

# Buckets that fit a control message alone but not together, and some that never do.
SHAPES = [(200,), (220,), (20, 11), (3000,), (180,), (2500,), (7,)]


def _train(arguments: dict[str, Any], in_order: bool) -> str:
    """Give the parameters their gradients in a certain order or in any, all at once or with pauses."""
    parameters = new_parameters(SHAPES, torch.float32)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **arguments)
    chance = random.Random(hvd.rank())
    history = []
    for step in range(5):
        optimizer.zero_grad()
        order = list(range(len(SHAPES)))
        if not in_order:
            chance.shuffle(order)
        for index in order:
            (parameters[index] * gradient(parameters[index], index, hvd.rank(), step)).sum().backward()
            if not in_order:
                time.sleep(chance.choice([0, 0, 0.0005, 0.003]))
        optimizer.synchronize()
        history.append(bits(grads(parameters)))
        with optimizer.skip_synchronize():
            optimizer.step()
    return "".join(history)


@on_hvd_workers(3, arguments=[{}, {"groups": 99}, {"groups": 4}, {"compression": hvd.Compression.fp16}])
def test_the_order_in_which_gradients_come_about_changes_no_bit(arguments: dict[str, Any]) -> str:
    history, *others = [_train(arguments, in_order) for in_order in (True, False, False)]
    assert others == [history] * 2
    return history


class Half(Compressor):
    """Converts as Compression.fp16 does, tensor by tensor, because it does not set `sent_dtype`."""

    compress = hvd.Compression.fp16.compress
    decompress = hvd.Compression.fp16.decompress


# In messages, in the fusion buffer, and too large to be fused; with different memory layouts.
CONVERTED_SHAPES = [(200,), (20, 11), (3000,), (64, 3, 7, 7), (0,), (), (600, 1000), (7,)]


@on_hvd_workers(
    3,
    case=[
        ([torch.float32], {}),
        ([torch.float32, torch.float64, torch.float16], {"op": hvd.Sum}),
        ([torch.float32], {"groups": 99, "gradient_predivide_factor": 3.0}),
    ],
)
def test_converting_while_packing_gives_the_same_bits_as_before(case: tuple[list[torch.dtype], dict[str, Any]]) -> str:
    dtypes, arguments = case
    histories = []
    for compression in (Half, hvd.Compression.fp16):
        parameters = [
            (one.to(memory_format=torch.channels_last) if one.dim() == 4 else one)
            .detach()
            .to(dtypes[index % len(dtypes)])
            .requires_grad_()
            for index, one in enumerate(new_parameters(CONVERTED_SHAPES))
        ]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(parameters), compression=compression, **arguments)
        history = ""
        for step in range(3):
            optimizer.zero_grad()
            backward([parameter.double() for parameter in parameters], hvd.rank(), step)
            optimizer.synchronize()
            assert [one.grad.dtype for one in parameters] == [one.dtype for one in parameters]
            history += bits(grads(parameters))
        histories.append(history)
    assert histories[0] == histories[1]
    return histories[0]
