"""hvd on an accelerator: every operation comes after what it needs, on a machine that checks that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import fake_accelerator as fake
import pytest
import torch
from fake_accelerator import DEVICE
from torch import nn
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.engine.connections import Links
from lockstep.hvd.engine.request import Collective
from lockstep.world import accelerator
from lockstep.world.world import World

Case = Callable[[World], Any]


def fresh(rows: int = 4, columns: int = 3) -> torch.Tensor:
    """A tensor that the current stream has just written."""
    return torch.zeros(rows, columns, device=DEVICE) + 1


def read(result: Any) -> None:
    """As a script does with a result: read it, and then change it."""
    for tensor in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(tensor, torch.Tensor) and tensor.device == DEVICE:
            (tensor * 2).sum()
            tensor.mul_(2)


def waited(handle: int) -> Any:
    return hvd.synchronize(handle)


def splits(world: World) -> torch.Tensor:
    return torch.tensor([2] * world.size, dtype=torch.int32)


def some_rows(world: World) -> torch.Tensor:
    return fresh(2 * world.size)


CASES: dict[str, Case] = {
    "allreduce": lambda world: hvd.allreduce(fresh()),
    "allreduce, large": lambda world: hvd.allreduce(fresh(9 << 10, 1 << 10)),
    "allreduce, scaled": lambda world: hvd.allreduce(fresh(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3),
    "allreduce, half": lambda world: hvd.allreduce(fresh().half()),
    "allreduce, bool": lambda world: hvd.allreduce(fresh() > 0, op=hvd.Max),
    "allreduce, compressed": lambda world: hvd.allreduce(fresh(), compression=hvd.Compression.fp16),
    "allreduce, Adasum": lambda world: hvd.allreduce(fresh(), op=hvd.Adasum),
    "allreduce_": lambda world: hvd.allreduce_(fresh()),
    "allreduce_, not contiguous": lambda world: hvd.allreduce_(fresh(8, 6)[:, ::2]),
    "allreduce_async": lambda world: waited(hvd.allreduce_async(fresh(), name="a")),
    "allreduce_async_": lambda world: waited(hvd.allreduce_async_(fresh(), name="a")),
    "several allreduce_async_": lambda world: [
        waited(handle) for handle in [hvd.allreduce_async_(fresh(), name=str(number)) for number in range(5)]
    ],
    "grouped_allreduce": lambda world: hvd.grouped_allreduce([fresh(), fresh(5)]),
    "grouped_allreduce_": lambda world: hvd.grouped_allreduce_([fresh(), fresh(9 << 10, 1 << 10), fresh()]),
    "grouped_allreduce_, in several loads of the buffer": lambda world: hvd.grouped_allreduce_(
        [fresh(5 << 10, 1 << 10) for _ in range(4)]
    ),
    "grouped_allreduce_, not contiguous": lambda world: hvd.grouped_allreduce_([fresh(8, 6)[:, ::2], fresh()]),
    "grouped_allreduce_async_": lambda world: waited(hvd.grouped_allreduce_async_([fresh(), fresh(5)], name="g")),
    "allgather": lambda world: hvd.allgather(fresh(world.rank + 1)),
    "allgather_async": lambda world: waited(hvd.allgather_async(fresh(), name="a")),
    "grouped_allgather": lambda world: hvd.grouped_allgather([fresh(), fresh(world.rank + 2)]),
    "broadcast": lambda world: hvd.broadcast(fresh(), 1),
    "broadcast_": lambda world: hvd.broadcast_(fresh(), 1),
    "broadcast_, not contiguous": lambda world: hvd.broadcast_(fresh(8, 6)[:, ::2], 0),
    "broadcast_async_": lambda world: waited(hvd.broadcast_async_(fresh(), 0, name="b")),
    "alltoall": lambda world: hvd.alltoall(some_rows(world), splits=splits(world)),
    "alltoall_async": lambda world: waited(hvd.alltoall_async(some_rows(world), splits=splits(world), name="a")),
    "reducescatter": lambda world: hvd.reducescatter(some_rows(world)),
    "reducescatter_async": lambda world: waited(hvd.reducescatter_async(some_rows(world), name="r")),
    "grouped_reducescatter": lambda world: hvd.grouped_reducescatter([some_rows(world), fresh(world.size)]),
}


def training(world: World, **settings: Any) -> None:
    """Steps of a DistributedOptimizer, whose gradients travel while the backward pass goes on."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(DEVICE)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **settings)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(settings.get("backward_passes_per_step", 1)):
            model(fresh()).sum().backward()
        optimizer.step()


def training_compressed(world: World) -> None:
    training(world, compression=hvd.Compression.fp16, backward_passes_per_step=2)


def batch_norm(world: World) -> None:
    layer = hvd.SyncBatchNorm(3).to(DEVICE)
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data = tensor.data + 0
    for _ in range(2):
        images = fresh().view(4, 3, 1, 1).expand(4, 3, 2, 2).contiguous().requires_grad_()
        layer(images).sum().backward()
        read(images.grad)


def joined(world: World) -> None:
    """The last worker has a batch more than the others, who go along with zeros."""
    for number in range(2 if world.rank == world.size - 1 else 1):
        read(hvd.allreduce(fresh(), name=f"batch {number}"))
    hvd.join()


def sparse(world: World) -> None:
    torch.Tensor.coalesce = lambda tensor: tensor  # type: ignore[method-assign]  # there is none without data
    indices = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE) + 1
    tensor = torch.sparse_coo_tensor(indices, fresh(2), (5, 3), check_invariants=False)._coalesced_(True)
    del indices
    finish = hvd.sparse_allreduce_async(tensor, name="embedding", op=hvd.Average)
    del tensor
    read(finish()._values())


WORK: dict[str, Case] = {
    "training": training,
    "training, compressed": training_compressed,
    "SyncBatchNorm": batch_norm,
    "join": joined,
    "sparse": sparse,
}


def run(world: World, names: list[str], elsewhere: bool, without: str) -> tuple[list[str], dict[str, list[str]]]:
    """The faults of each case, and how the groups ended.

    Args:
        elsewhere: Compute on a stream of the script's own, and read on the default one.
        without: What is left out, for the machine to find.
    """
    machine = fake.install()
    sabotage(without)
    hvd.init()
    faults: dict[str, list[str]] = {}
    with fake.Watch(machine):
        for name in names:
            side = accelerator.new_stream(DEVICE)
            with machine.on(side) if elsewhere else nullcontext():  # type: ignore[arg-type]
                if name in WORK:
                    WORK[name](world)
                else:
                    result = CASES[name](world)
                    read(result)
                    del result
            faults[name], machine.faults = machine.faults, []
    hvd.shutdown()
    return [end for group in machine.groups for end in group.ended], {
        name: found for name, found in faults.items() if found
    }


def sabotage(what: str) -> None:
    """Leave out one of the things that the order rests on."""

    @contextmanager
    def no_wait(links: Links, device: torch.device, batch: list[Collective]) -> Iterator[Any]:
        for request in batch:
            request.written = {}
        with on_stream(links, device, batch) as stream:
            yield stream

    on_stream = Links.on_stream
    if what == "the set's stream does not wait for the caller's":
        Links.on_stream = no_wait  # type: ignore[assignment]
    elif what == "the caller's stream does not wait for the set's":
        fake.FakeStream.wait_event = _only_for_sets(fake.FakeStream.wait_event)  # type: ignore[method-assign]
    elif what == "the thread does not set its device":
        accelerator.use = lambda device: None
    elif what == "no stream is noted for memory":
        torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]


def _only_for_sets(wait: Callable[..., None]) -> Callable[..., None]:
    def wait_event(stream: fake.FakeStream, event: fake.Clock) -> None:
        if stream is not stream.machine.default:
            wait(stream, event)

    return wait_event


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on the default stream", "on a stream of its own"])
def test_everything_comes_after_what_it_needs(elsewhere: bool) -> None:
    for ends, faults in run_in_workers(2, run, [*CASES, *WORK], elsewhere, ""):
        assert faults == {}
        assert ends == ["shutdown"]


@pytest.mark.parametrize(
    ("without", "fault"),
    [
        ("the set's stream does not wait for the caller's", "may come before the last write"),
        ("the caller's stream does not wait for the set's", "may come before the last write"),
        ("the thread does not set its device", "a thread uses the accelerator that has not set its device"),
        ("no stream is noted for memory", "memory is given back that another stream may still use"),
    ],
)
def test_what_is_left_out_is_found(without: str, fault: str) -> None:
    for _, faults in run_in_workers(2, run, ["allreduce", "several allreduce_async_"], False, without):
        assert any(fault in found for case in faults.values() for found in case), faults
