"""Gradients of every collective, against values computed manually from all workers' gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd

Tensor = torch.Tensor


def leaf(rank: int, *shape: int) -> Tensor:
    return torch.full(shape, rank + 1.0, requires_grad=True)


def weights(rank: int, *shape: int) -> Tensor:
    """What a worker multiplies a result by before it adds it up: so its gradient of that result."""
    numbers = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    return numbers * (1 if rank % 2 else -2) + rank


def gradient(result: Tensor, rank: int, *inputs: Tensor) -> list[Tensor]:
    (result * weights(rank, *result.shape)).sum().backward()
    return [tensor.grad for tensor in inputs]


@on_hvd_workers(2, 3)
def test_allreduce_reduces_the_gradients_in_the_same_way(rank: int, size: int) -> None:
    reductions = {
        hvd.Average: lambda rows: rows.mean(0),
        hvd.Sum: lambda rows: rows.sum(0),
        hvd.Min: lambda rows: rows.amin(0),
        hvd.Max: lambda rows: rows.amax(0),
        hvd.Product: lambda rows: rows.prod(0),
    }
    for count in (3, 1200):
        for op, reduction in reductions.items():
            for prescale, postscale in ((1.0, 1.0), (2.0, 0.25)):
                rows = torch.stack([weights(other, count) for other in range(size)])
                wanted = reduction(rows * prescale) * postscale
                options = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale}
                mine = leaf(rank, count)
                (single,) = gradient(hvd.allreduce(mine, **options), rank, mine)
                torch.testing.assert_close(single, wanted)
                group = [leaf(rank, count), leaf(rank, 2)]
                first, second = hvd.grouped_allreduce(group, **options)
                (part,) = gradient(first, rank, group[0])
                torch.testing.assert_close(part, wanted)
                assert second.requires_grad


@on_hvd_workers(2, 3)
def test_allgather_averages_the_gradients_of_the_own_rows(rank: int, size: int) -> None:
    for rows in (lambda other: other + 1, lambda other: other % 2):  # uneven; none on rank 0
        counts = [rows(other) for other in range(size)]
        average = torch.stack([weights(other, sum(counts), 2) for other in range(size)]).mean(0)
        wanted = average.split(counts)[rank]
        mine = leaf(rank, counts[rank], 2)
        assert gradient(hvd.allgather(mine), rank, mine)[0].equal(wanted)
        group = [leaf(rank, 2), leaf(rank, counts[rank], 2)]
        assert gradient(hvd.grouped_allgather(group)[1], rank, group[1])[0].equal(wanted)


@on_hvd_workers(2, 3)
def test_broadcast_averages_the_gradients_on_the_root(rank: int, size: int) -> None:
    for root in range(size):
        mine = leaf(rank, 2, 2)
        average = torch.stack([weights(other, 2, 2) for other in range(size)]).mean(0)
        result = gradient(hvd.broadcast(mine, root), rank, mine)[0]
        torch.testing.assert_close(result, average if rank == root else torch.zeros(2, 2))


@on_hvd_workers(2, 3)
def test_alltoall_sends_the_gradients_back(rank: int, size: int) -> None:
    table = [[(other + peer) % 3 for peer in range(size)] for other in range(size)]
    received = [[row[peer] for row in table] for peer in range(size)]
    mine = leaf(rank, sum(table[rank]) + 2, 2)  # two rows more than are sent
    output, counts = hvd.alltoall(mine, torch.tensor(table[rank], dtype=torch.int32))
    assert not counts.requires_grad
    back = [weights(peer, sum(received[peer]), 2).split(received[peer])[rank] for peer in range(size)]
    assert gradient(output, rank, mine)[0].equal(torch.cat([*back, torch.zeros(2, 2)]))
    mine = leaf(rank, 2 * size)
    wanted = torch.cat([weights(peer, 2 * size).chunk(size)[rank] for peer in range(size)])
    assert gradient(hvd.alltoall(mine), rank, mine)[0].equal(wanted)


@on_hvd_workers(2, 3)
def test_reducescatter_gathers_the_gradients(rank: int, size: int) -> None:
    counts = [len(part) for part in torch.empty(5, 2).tensor_split(size)]
    gathered = torch.cat([weights(other, counts[other], 2) for other in range(size)])
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        for prescale, postscale in ((1.0, 1.0), (2.0, 0.25)):
            options = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale}
            wanted = gathered * (factor * prescale * postscale)
            mine = leaf(rank, 5, 2)
            torch.testing.assert_close(gradient(hvd.reducescatter(mine, **options), rank, mine)[0], wanted)
            group = [leaf(rank, 5, 2), leaf(rank, 3)]
            parts = hvd.grouped_reducescatter(group, **options)
            torch.testing.assert_close(gradient(parts[0], rank, group[0])[0], wanted)


@on_hvd_workers(2)
def test_expanded_gradients_are_reduced(rank: int) -> None:
    for count in (3, 1200):
        calls: list[tuple[Callable[[Tensor], Tensor], list[float]]] = [
            (hvd.allreduce, [1.0, 1.0]),
            (hvd.allgather, [1.0, 1.0]),
            (lambda tensor: hvd.broadcast(tensor, 0), [1.0, 0.0]),
            (lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum), [2.0, 2.0]),
            (lambda tensor: hvd.allreduce(tensor.t()), [1.0, 1.0]),
        ]
        for call, by_rank in calls:
            mine = leaf(rank, count, 2)
            call(mine).sum().backward()
            assert mine.grad.equal(torch.full((count, 2), by_rank[rank]))


@on_hvd_workers(2)
def test_a_result_or_an_input_may_be_used_twice(rank: int) -> None:
    mine = leaf(rank, 3)
    result = hvd.allreduce(mine, op=hvd.Sum)
    (result * 2 + result).sum().backward()
    assert mine.grad.tolist() == [6.0] * 3
    mine = leaf(rank, 3)
    (hvd.allreduce(mine, op=hvd.Sum) + hvd.allreduce(mine) * mine).sum().backward()
    assert mine.grad.tolist() == [2.0 + 1.5 + 1.5] * 3  # of the sum, of the average, of the factor
    mine = leaf(rank, 3)
    hvd.allreduce(hvd.allreduce(mine, op=hvd.Sum), op=hvd.Sum).sum().backward()
    assert mine.grad.tolist() == [4.0] * 3
    mine = leaf(rank, 3)
    result = hvd.allreduce(mine, op=hvd.Sum)
    for _ in range(2):
        result.sum().backward(retain_graph=True)
    assert mine.grad.tolist() == [4.0] * 3


@on_hvd_workers(2)
def test_results_may_be_changed_in_place_before_backward(rank: int) -> None:
    for count in (3, 1200):
        mine = leaf(rank, count)
        result = hvd.allreduce(mine)
        result.mul_(3)
        result.sum().backward()
        assert mine.grad.tolist() == [3.0] * count
        group = [leaf(rank, count), leaf(rank, count)]
        first, second = hvd.grouped_allreduce(group)
        square = second * second
        first.add_(1)  # must not count as a change of the second one
        square.sum().backward()
        assert group[1].grad.tolist() == [3.0] * count


@on_hvd_workers(2)
def test_compression_lets_the_gradient_through(rank: int) -> None:
    for call in (hvd.allreduce, hvd.reducescatter):
        mine = leaf(rank, 4)
        call(mine, compression=hvd.Compression.fp16).sum().backward()
        assert mine.grad.tolist() == [1.0] * 4
        assert mine.grad.dtype == torch.float32


@on_hvd_workers(2)
def test_groups_may_hold_tensors_without_gradient(rank: int) -> None:
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather):
        mine = leaf(rank, 2)
        first, second, third = call([mine, torch.ones(2, dtype=torch.int64), torch.ones(2)])
        assert not second.requires_grad
        (first.sum() + third.sum()).backward()
        assert mine.grad.tolist() == [1.0] * 2


@on_workers(3)
def test_gradients_stay_within_a_process_set(rank: int) -> None:
    hvd.init(process_sets=[pair := hvd.ProcessSet([0, 2])])
    if pair.included():
        mine = leaf(rank, 4)
        torch.testing.assert_close(
            gradient(hvd.allreduce(mine, process_set=pair), rank, mine)[0], (weights(0, 4) + weights(2, 4)) / 2
        )
        mine = leaf(rank, 4)
        result = gradient(hvd.broadcast(mine, 2, process_set=pair), rank, mine)[0]
        assert result.any() == (rank == 2)
        mine = leaf(rank, 4)
        hvd.reducescatter(mine, op=hvd.Sum, process_set=pair).sum().backward()
        assert mine.grad.tolist() == [2.0] * 4
        mine = leaf(rank, 4)
        hvd.allgather(mine, process_set=pair).sum().backward()
        assert mine.grad.tolist() == [1.0] * 4
    hvd.shutdown()


@on_hvd_workers(2)
def test_without_gradient_nothing_is_recorded(rank: int) -> None:
    mine = leaf(rank, 4)
    with torch.no_grad():
        assert not hvd.allreduce(mine).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(mine)).requires_grad
    assert not hvd.allreduce(mine.detach()).requires_grad
    assert hvd.allreduce(mine).requires_grad
    assert hvd.allreduce(mine * 2).requires_grad
