"""Each operation of hvd gives a CPU's values on a GPU whose stream has not run anything yet when it is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus
from torch import nn

from lockstep import hvd
from lockstep.hvd.engine import fusion, transfers
from lockstep.world import accelerator
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")

CPU = torch.device("cpu")
HEAD_START_SECONDS = 0.02  # of work that does not wait for the held stream, though it should
BUFFER_BYTES = 1000  # less than a large tensor
COLLECTIVE_US = 20_000  # reads that do not wait for a collective come earlier


class Inputs:
    """The tensors of a worker, on one device."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.rank, self.size, self.device = world.rank, world.size, device

    def fresh(self, rows: int = 4, columns: int = 3) -> torch.Tensor:
        """Return a tensor that the current stream has yet to compute."""
        count = torch.arange(rows * columns, dtype=torch.float32, device=self.device)
        return (count.remainder(5) + self.rank).view(rows, columns)

    def equal_parts(self) -> torch.Tensor:
        return self.fresh(2 * self.size)

    def splits(self) -> torch.Tensor:
        return torch.tensor([2] * self.size, dtype=torch.int32)


OPERATIONS: dict[str, Callable[[Inputs], Any]] = {
    "allreduce": lambda own: hvd.allreduce(own.fresh()),
    "allreduce, large": lambda own: hvd.allreduce(own.fresh(9, 100)),
    "allreduce, scaled": lambda own: hvd.allreduce(own.fresh(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3),
    "allreduce, half": lambda own: hvd.allreduce(own.fresh().half()),
    "allreduce, bool": lambda own: hvd.allreduce(own.fresh() > 3, op=hvd.Max),
    "allreduce, compressed": lambda own: hvd.allreduce(own.fresh(), compression=hvd.Compression.fp16),
    "allreduce, Adasum": lambda own: hvd.allreduce(own.fresh(), op=hvd.Adasum),
    "allreduce_": lambda own: hvd.allreduce_(own.fresh()),
    "allreduce_, not contiguous": lambda own: hvd.allreduce_(own.fresh(8, 6)[:, ::2]),
    "allreduce_async": lambda own: hvd.synchronize(hvd.allreduce_async(own.fresh(), name="a")),
    "allreduce_async_": lambda own: hvd.synchronize(hvd.allreduce_async_(own.fresh(), name="a")),
    "several allreduce_async_": lambda own: [
        hvd.synchronize(handle)
        for handle in [hvd.allreduce_async_(own.fresh(), name=str(number)) for number in range(5)]
    ],
    "grouped_allreduce": lambda own: hvd.grouped_allreduce([own.fresh(), own.fresh(5)]),
    "grouped_allreduce_": lambda own: hvd.grouped_allreduce_([own.fresh(), own.fresh(9, 100), own.fresh()]),
    "grouped_allreduce_, in several loads of the buffer": lambda own: hvd.grouped_allreduce_(
        [own.fresh(5, 40) for _ in range(4)]
    ),
    "grouped_allreduce_, not contiguous": lambda own: hvd.grouped_allreduce_([own.fresh(8, 6)[:, ::2], own.fresh()]),
    "grouped_allreduce_async_": lambda own: hvd.synchronize(
        hvd.grouped_allreduce_async_([own.fresh(), own.fresh(5)], name="g")
    ),
    "allgather": lambda own: hvd.allgather(own.fresh(own.rank + 1)),
    "allgather_async": lambda own: hvd.synchronize(hvd.allgather_async(own.fresh(), name="a")),
    "grouped_allgather": lambda own: hvd.grouped_allgather([own.fresh(), own.fresh(own.rank + 2)]),
    "broadcast": lambda own: hvd.broadcast(own.fresh(), 1),
    "broadcast_": lambda own: hvd.broadcast_(own.fresh(), 1),
    "broadcast_, not contiguous": lambda own: hvd.broadcast_(own.fresh(8, 6)[:, ::2], 0),
    "broadcast_async_": lambda own: hvd.synchronize(hvd.broadcast_async_(own.fresh(), 0, name="b")),
    "alltoall": lambda own: hvd.alltoall(own.equal_parts(), splits=own.splits())[0],
    "alltoall_async": lambda own: hvd.synchronize(hvd.alltoall_async(own.equal_parts(), splits=own.splits(), name="a"))[
        0
    ],
    "reducescatter": lambda own: hvd.reducescatter(own.equal_parts()),
    "reducescatter_async": lambda own: hvd.synchronize(hvd.reducescatter_async(own.equal_parts(), name="r")),
    "grouped_reducescatter": lambda own: hvd.grouped_reducescatter([own.equal_parts(), own.fresh(own.size)]),
}


def _train(own: Inputs, **options: Any) -> list[torch.Tensor]:
    """Return the weights after some steps, whose gradients are reduced while the backward pass goes on."""
    with own.device:  # a copy of a CPU's model would wait for the stream
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        for parameter in model.parameters():
            parameter.data = torch.arange(parameter.numel()).remainder(5).sub(2).div(10).view_as(parameter)
    plain = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            model(own.fresh()).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _train_compressed(own: Inputs) -> list[torch.Tensor]:
    return _train(own, compression=hvd.Compression.fp16, backward_passes_per_step=2)


def _norm(own: Inputs) -> list[torch.Tensor]:
    """Return the gradient of a batch norm's input, and its statistics; on a CPU, all workers' images are one batch."""
    images = own.fresh().view(4, 3, 1, 1).expand(4, 3, 2, 2).contiguous()
    is_whole = own.device == CPU
    layer = (nn.BatchNorm2d(3) if is_whole else hvd.SyncBatchNorm(3)).to_empty(device=own.device)
    layer.reset_parameters()
    images = (hvd.allgather(images) if is_whole else images).requires_grad_()
    for _ in range(2):
        (layer(images) ** 3).sum().backward()
    assert images.grad is not None
    gradient = images.grad[4 * own.rank :][:4] if is_whole else images.grad
    return [gradient, layer.running_mean, layer.running_var]


def _join(own: Inputs) -> list[torch.Tensor]:
    """The last worker has a batch more than the others, who go along with zeros."""
    count = 2 if own.rank == own.size - 1 else 1
    results = [hvd.allreduce(own.fresh(), name=f"batch {number}") for number in range(count)]
    hvd.join()
    return results


OPERATIONS |= {"training": _train, "training, compressed": _train_compressed, "SyncBatchNorm": _norm, "join": _join}


def _read(result: Any) -> list[torch.Tensor]:
    """Read and then change each tensor, as scripts do; return what was read, and what it was changed into."""
    tensors = result if isinstance(result, (list, tuple)) else [result]
    return [value for tensor in tensors for value in (tensor.clone(), tensor.logical_not_())]


@contextmanager
def _held(device: torch.device) -> Iterator[None]:
    """Let the current stream start only when the host has left the block and all other streams could have run."""
    with simgpu.held(accelerator.current_stream(device)):
        yield
        time.sleep(HEAD_START_SECONDS)


@pytest.mark.parametrize("on_side_stream", [False, True])
@on_gpus(2)
def test_operations_follow_what_the_streams_have_yet_to_do(world: World, on_side_stream: bool) -> None:
    transfers.BUFFER_BYTES = fusion.BUFFER_BYTES = BUFFER_BYTES
    hvd.init()
    gpu = torch.device("simgpu", world.rank)
    hvd.allreduce(torch.ones(1, device=gpu))  # connects
    different = []
    for name, operation in OPERATIONS.items():
        expected = _read(operation(Inputs(world, CPU)))
        simgpu.delays(collective_us=COLLECTIVE_US)
        stream = accelerator.new_stream(gpu) if on_side_stream else accelerator.current_stream(gpu)
        with accelerator.on(stream):
            with _held(gpu):
                values = _read(operation(Inputs(world, gpu)))
            on_host = [value.cpu() for value in values]
        simgpu.delays()
        if not all(map(_is_close, on_host, expected)):
            different.append(name)
    assert different == []
    hvd.shutdown()


def _is_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(value.float(), expected.float(), rtol=1e-3 if value.dtype == torch.float16 else 1e-5)
