"""How much slower are the collectives of Lockstep's Horovod API than plain torch.distributed?

    python benchmarks/hvd_collectives.py

Two workers on this machine, one thread each, Gloo on loopback. Bars by wall time:
- synchronous hvd.allreduce of 4 B: at most 2.5 times dist.all_reduce;
- of 16 and 64 MB: at most 1.10 times clone + all_reduce + divide; in place, Sum at most 1.05 times plain all_reduce,
  and Average at most 1.10 times all_reduce + divide;
- 60 tensors of 64 KB, submitted one by one or grouped: at most 1.15 times concatenate + all_reduce + copy back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import Bar, Unit, Work
from workers import compare_in_workers, in_workers

from lockstep import hvd
from lockstep.world.world import World

MICROSECONDS = Unit("µs per call", 1e6)
MILLISECONDS = Unit("ms per call", 1e3)


def repeated(times: int, call: Work) -> Work:
    def turn() -> int:
        for _ in range(times):
            call()
        return times

    return turn


def small(world: World) -> None:
    tensor = torch.ones(1)

    def ours() -> int:
        hvd.allreduce(tensor, name="x")
        return 1

    def bare() -> int:
        dist.all_reduce(tensor)
        return 1

    contestants = {"dist.all_reduce": repeated(500, bare), "hvd.allreduce": repeated(500, ours)}
    bars = {"hvd.allreduce": Bar("at most", 2.5)}
    compare_in_workers(world, "hvd_collectives: 4 B", contestants, bars, MICROSECONDS, 15)


def large(world: World, megabytes: int) -> None:
    tensor = torch.ones(megabytes * 2**18)

    def clone_reduce_divide() -> int:
        result = tensor.clone()
        dist.all_reduce(result)
        result /= world.size
        return 1

    def ours() -> int:
        hvd.allreduce(tensor, name="x")
        return 1

    def bare() -> int:
        dist.all_reduce(tensor)
        return 1

    def reduce_divide() -> int:
        nonlocal tensor
        dist.all_reduce(tensor)
        tensor /= world.size
        return 1

    def ours_in_place() -> int:
        hvd.allreduce_(tensor, name="x", op=hvd.Sum)
        return 1

    def ours_average_in_place() -> int:
        hvd.allreduce_(tensor, name="x")
        return 1

    times = max(2, 64 // megabytes)
    name = f"hvd_collectives: {megabytes} MB"
    out_of_place = {"clone + all_reduce + /=": clone_reduce_divide, "hvd.allreduce": ours}
    sums = {"dist.all_reduce": bare, "hvd.allreduce_ Sum": ours_in_place}
    averages = {"dist.all_reduce + /=": reduce_divide, "hvd.allreduce_ Average": ours_average_in_place}
    for suffix, contestants, bars in (
        ("", out_of_place, {"hvd.allreduce": Bar("at most", 1.10)}),
        (" in place", sums, {"hvd.allreduce_ Sum": Bar("at most", 1.05)}),
        (" averaged in place", averages, {"hvd.allreduce_ Average": Bar("at most", 1.10)}),
    ):
        turns = {key: repeated(times, call) for key, call in contestants.items()}
        tensor.fill_(0.0)
        compare_in_workers(world, name + suffix, turns, bars, MILLISECONDS, 15)


def many(world: World) -> None:
    tensors = [torch.ones(64 * 2**8) for _ in range(60)]
    names = [f"t{index}" for index in range(60)]

    def concatenated() -> int:
        buffer = torch.cat(tensors)
        dist.all_reduce(buffer)
        results = [torch.empty_like(tensor) for tensor in tensors]
        for result, part in zip(results, buffer.split(tensors[0].numel()), strict=True):
            result.copy_(part)
        return 1

    def one_by_one() -> int:
        handles = [hvd.allreduce_async(t, name=name, op=hvd.Sum) for t, name in zip(tensors, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)
        return 1

    def grouped() -> int:
        hvd.grouped_allreduce(tensors, name="group", op=hvd.Sum)
        return 1

    contestants = {"cat + all_reduce + copy": concatenated, "hvd one by one": one_by_one, "hvd grouped": grouped}
    bars = {"hvd one by one": Bar("at most", 1.15), "hvd grouped": Bar("at most", 1.15)}
    turns = {key: repeated(10, call) for key, call in contestants.items()}
    compare_in_workers(world, "hvd_collectives: 60 x 64 KB", turns, bars, MILLISECONDS, 15)


def main(world: World) -> None:
    hvd.init()
    small(world)
    for megabytes in (16, 64):
        large(world, megabytes)
    many(world)
    hvd.shutdown()


if __name__ == "__main__":
    in_workers(2, main)
