"""Checks in two workers that share one GPU: hvd's collectives and optimizer, as a Horovod script calls them.

The reference: each worker computes the tensors of all workers from their ranks, and reduces them itself. Sums of small
integers are exact in every dtype. A sum of two workers' fractions is too, because there is only one order.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gpu.checking import Skip, run_checks
from gpu.device import DEVICE, ON_CUDA, ON_GPU, size
from lockstep import hvd
from lockstep.errors import ReplicasDifferError
from lockstep.world import accelerator

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32)
COUNTS = (1, 7, 1000, 3 << 18)  # sent within a control message, fused, and reduced in place


def _mine(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count, device=DEVICE) % 7 + rank).to(dtype)


def _all(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensors of all workers, [workers, count]."""
    return torch.stack([_mine(rank, count, dtype) for rank in range(hvd.size())])


def _random(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def _same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.device == expected.device, (result.device, expected.device)
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert torch.equal(result, expected), f"off by {(result.double() - expected.double()).abs().max()}"


def check_two_workers_are_there() -> None:
    os.environ["LOCKSTEP_CHECK_REPLICAS"] = "2"
    hvd.init()
    assert hvd.size() == 2, hvd.size()
    if ON_GPU:
        torch.accelerator.set_device_index(hvd.local_rank() % torch.accelerator.device_count())


def check_allreduce() -> None:
    for dtype in (*FLOATING, *WHOLE):
        for count in COUNTS:
            given, rows = _mine(hvd.rank(), count, dtype), _all(count, dtype)
            _same(hvd.allreduce(given, op=hvd.Sum), rows.sum(0, dtype=dtype))
            _same(hvd.allreduce(given, op=hvd.Min), rows.amin(0))
            _same(hvd.allreduce(given, op=hvd.Max), rows.amax(0))
            _same(hvd.allreduce(given, op=hvd.Product), rows.prod(0, dtype=dtype))
            if dtype in FLOATING:
                _same(hvd.allreduce(given), rows.sum(0, dtype=dtype) / hvd.size())
            _same(given, _mine(hvd.rank(), count, dtype))  # the input is unchanged
            assert hvd.allreduce_(given, op=hvd.Sum) is given
            _same(given, rows.sum(0, dtype=dtype))


def check_allreduce_of_fractions_and_scales() -> None:
    for count in COUNTS:
        rows = [_random(rank, count) for rank in range(2)]
        _same(hvd.allreduce(rows[hvd.rank()], op=hvd.Sum), rows[0] + rows[1])
        scaled = hvd.allreduce(rows[hvd.rank()], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        _same(scaled, (rows[0] * 0.5 + rows[1] * 0.5) * 4.0)
        half = hvd.allreduce(rows[hvd.rank()], compression=hvd.Compression.fp16)
        assert torch.allclose(half, (rows[0] + rows[1]) / 2, atol=0.01)


def check_grouped_allreduce() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        given = [_mine(hvd.rank(), count, dtype) for count in COUNTS]
        expected = [_all(count, dtype).sum(0, dtype=dtype) for count in COUNTS]
        for result, wanted in zip(hvd.grouped_allreduce(given, op=hvd.Sum), expected, strict=True):
            _same(result, wanted)
        hvd.grouped_allreduce_(given, op=hvd.Sum)
        for result, wanted in zip(given, expected, strict=True):
            _same(result, wanted)


def check_truth_values_and_views() -> None:
    flags = torch.tensor([True, False, hvd.rank() == 0], device=DEVICE)
    _same(hvd.allreduce(flags, op=hvd.Max), torch.tensor([True, False, True], device=DEVICE))
    matrix = _random(hvd.rank(), 30, 40).T  # not contiguous
    _same(hvd.allreduce(matrix, op=hvd.Sum), _random(0, 30, 40).T + _random(1, 30, 40).T)
    images = _random(hvd.rank(), 4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    _same(hvd.allreduce(images, op=hvd.Sum), _random(0, 4, 3, 5, 5) + _random(1, 4, 3, 5, 5))
    number = torch.tensor(float(hvd.rank() + 1), device=DEVICE)
    _same(hvd.allreduce(number, op=hvd.Sum), torch.tensor(3.0, device=DEVICE))
    nothing = torch.empty(0, 4, device=DEVICE)
    _same(hvd.allgather(nothing), nothing)


def check_allgather() -> None:
    for dtype in (*FLOATING, *WHOLE, torch.uint8, torch.bool):
        rows = [_mine(rank, 12 * (rank + 1), torch.int64).remainder(2).to(dtype).view(-1, 4) for rank in range(2)]
        _same(hvd.allgather(rows[hvd.rank()]), torch.cat(rows))
    large = [_random(rank, 1000 + rank, 300) for rank in range(2)]
    _same(hvd.allgather(large[hvd.rank()]), torch.cat(large))


def check_broadcast() -> None:
    for dtype in (*FLOATING, *WHOLE, torch.uint8, torch.bool):
        for root in range(2):
            rows = [(_mine(rank, 100_000, torch.int64) % 2).to(dtype) for rank in range(2)]
            _same(hvd.broadcast(rows[hvd.rank()], root), rows[root])
            given = rows[hvd.rank()].clone()
            hvd.broadcast_(given, root)
            _same(given, rows[root])


def check_alltoall() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = [_mine(rank, 20, dtype).view(10, 2) + 10 * rank for rank in range(2)]
        splits = [[7, 3], [0, 10]]
        result, received = hvd.alltoall(rows[hvd.rank()], splits=torch.tensor(splits[hvd.rank()], dtype=torch.int32))
        parts = [row.split(split)[hvd.rank()] for row, split in zip(rows, splits, strict=True)]
        _same(result, torch.cat(parts))
        assert received.tolist() == [len(part) for part in parts]


def check_reducescatter() -> None:
    for dtype in (*FLOATING, *WHOLE):
        rows = [_mine(rank, 5 * 300, dtype).view(5, 300) for rank in range(2)]
        whole = torch.stack(rows).sum(0, dtype=dtype)
        _same(hvd.reducescatter(rows[hvd.rank()], op=hvd.Sum), whole.split([3, 2])[hvd.rank()])


def check_adasum_of_equal_vectors_is_their_mean_and_of_orthogonal_ones_their_sum() -> None:
    same = hvd.allreduce(torch.ones(1000, device=DEVICE), op=hvd.Adasum)
    assert torch.allclose(same, torch.ones(1000, device=DEVICE))
    apart = torch.zeros(1000, device=DEVICE)
    apart[hvd.rank()] = 3.0
    expected = torch.zeros(1000, device=DEVICE)
    expected[:2] = 3.0
    assert torch.allclose(hvd.allreduce(apart, op=hvd.Adasum), expected)


def check_order_of_streams() -> None:
    """Check that an all-reduce waits for the producer's stream, and the consumer's stream for the all-reduce."""
    if not ON_GPU:
        raise Skip("needs a GPU")
    side, count, device = size(4096, 128), size(1 << 20, 1 << 10), accelerator.current()
    for _ in range(5):
        stream = accelerator.new_stream(device)
        stream.wait_stream(accelerator.current_stream(device))
        with accelerator.on(stream):
            matrix = torch.randn(side, side, device=DEVICE)
            for _ in range(10):
                matrix = torch.tanh(matrix @ matrix)
            given = (matrix * 0).flatten()[:count] + (hvd.rank() + 1)
            handle = hvd.allreduce_async(given, op=hvd.Sum)
            del given  # the allocator must not reuse its memory before it is read
            torch.full((count,), -1.0, device=DEVICE)
        other = accelerator.new_stream(device)
        with accelerator.on(other):
            result = hvd.synchronize(handle)
            total = result.double().sum()
        other.synchronize()
        assert float(total) == 3.0 * count, float(total)


def check_many_at_a_time_in_any_order() -> None:
    names = np.random.default_rng(hvd.rank()).permutation(60).tolist()
    handles = {}
    for name in names:
        tensor = torch.full((1 + 997 * name,), float(name + hvd.rank()), device=DEVICE)
        handles[name] = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"many.{name}")
    for name in sorted(handles):
        result = hvd.synchronize(handles[name])
        _same(result, torch.full((1 + 997 * name,), 2.0 * name + 1, device=DEVICE))


def _refusal(tensor: torch.Tensor, name: str) -> str:
    """Return the error of an all-reduce whose properties differ between workers."""
    try:
        hvd.allreduce(tensor, name=name)
    except hvd.HorovodInternalError as error:
        return str(error)
    raise AssertionError("no error")


def check_what_does_not_agree_is_an_error_and_the_job_goes_on() -> None:
    why = _refusal(torch.ones(3 + hvd.rank(), device=DEVICE), "differs")
    assert "shape" in why, why
    if ON_GPU:
        why = _refusal(torch.ones(3, device=DEVICE if hvd.rank() == 0 else torch.device("cpu")), "elsewhere")
        assert "device" in why, why
    _same(hvd.allreduce(torch.ones(3, device=DEVICE), op=hvd.Sum), torch.full((3,), 2.0, device=DEVICE))


def check_join() -> None:
    rounds = 2 + 3 * hvd.rank()
    for number in range(rounds):
        result = hvd.allreduce(torch.ones(10, device=DEVICE), op=hvd.Sum, name=f"until.join.{number}")
        expected = 2.0 if number < 2 else 1.0
        _same(result, torch.full((10,), expected, device=DEVICE))
    assert hvd.join() == 1


def _net(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Tanh(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def _images(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the concatenated batches of both workers: 32 images."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(32, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images.to(DEVICE, dtype), torch.randint(0, 10, (32,), generator=generator).to(DEVICE)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, dtype: torch.dtype, count: int = 5) -> None:
    images, labels = _images(dtype)
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()


def _own_part() -> slice:
    return slice(16 * hvd.rank(), 16 * (hvd.rank() + 1))


def _distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)


def check_distributed_optimizer_is_one_process_on_the_whole_batch() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        alone = _net(dtype)
        _steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), slice(None), dtype)
        model = _net(dtype, seed=hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        _steps(model, optimizer, _own_part(), dtype)
        assert _distance(model, alone) < tolerance, (dtype, _distance(model, alone))
        others = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
        assert torch.equal(others[0], others[1]), "the replicas differ"


def check_distributed_optimizer_with_compression_and_accumulation() -> None:
    alone = _net(torch.float32)
    _steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), slice(None), torch.float32)
    for options in ({"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}, {"groups": 2}):
        model = _net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        _steps(model, optimizer, _own_part(), torch.float32)
        assert _distance(model, alone) < 1e-2, options


def check_mixed_precision_with_torchs_scaler() -> None:
    """Follow Horovod's documentation: synchronize, unscale, then step with `skip_synchronize`."""
    model = _net(torch.float32)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters())
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0, enabled=ON_GPU)
    images, labels = _images(torch.float32)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=torch.float16 if ON_GPU else torch.bfloat16):
            loss = F.cross_entropy(model(images[_own_part()]).float(), labels[_own_part()])
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0], losses
    everyones = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
    assert torch.equal(everyones[0], everyones[1]), "the replicas differ"


def _wide(seed: int = 0) -> nn.Sequential:
    """Return a network whose gradients take longer to reduce than to compute."""
    torch.manual_seed(seed)
    side = size(2048, 32)
    return nn.Sequential(*(nn.Linear(side, side) for _ in range(4))).to(DEVICE)


def check_mixed_precision_in_torchs_order() -> None:
    """Scale, step and clip without `synchronize`, while gradients are large; one worker overflows in one step."""
    choices: list[dict[str, Any]] = [{}, {"momentum": 0.9, "fused": True}]
    for options in choices:
        for clips in (False, True):
            alone: Any = _wide()
            model: Any = _wide()
            plain = torch.optim.SGD(alone.parameters(), lr=0.01, **options)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, **options)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=4)
            scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
            inputs = [_random(rank, 16, alone[0].in_features) for rank in range(2)]
            for step in range(6):
                before = model[0].weight.detach().clone()
                overflows = step == 3 and hvd.rank() == 1
                optimizer.zero_grad()
                loss = model(inputs[hvd.rank()]).square().mean() * (math.inf if overflows else 1.0)
                scaler.scale(loss).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(before, model[0].weight) == (step == 3), step
                if step == 3:
                    continue
                plain.zero_grad()
                (alone(inputs[0]).square().mean() + alone(inputs[1]).square().mean()).div(2).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
                plain.step()
            assert _distance(model, alone) < 1e-4, (options, clips, _distance(model, alone))
            everyones = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
            assert torch.equal(everyones[0], everyones[1]), ("the replicas differ", options, clips)


def check_replicas_that_differ_are_noticed() -> None:
    """With LOCKSTEP_CHECK_REPLICAS=2, as the first check sets it."""
    model: Any = _net(torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    _steps(model, optimizer, _own_part(), torch.float32, count=12)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[3].bias[0] += 1e-3
    said = ""
    try:
        for _ in range(6):
            _steps(model, optimizer, _own_part(), torch.float32, count=1)
            hvd.barrier()
    except ReplicasDifferError as error:
        said = str(error)
    assert "the replicas differ after step 14" in said, said
    assert "first in 3.bias" in said or "first in 5.bias" in said or "first in 0.bias" in said, said


def check_sync_batch_norm_is_batch_norm_of_the_whole_batch() -> None:
    if not ON_GPU:
        raise Skip("hvd.SyncBatchNorm is for GPUs alone, as Horovod has it")
    torch.manual_seed(1)
    images, _ = _images(torch.float64)
    alone = nn.BatchNorm2d(3, device=DEVICE, dtype=torch.float64)
    whole = images.clone().requires_grad_()
    alone(whole).square().sum().backward()
    norm = hvd.SyncBatchNorm(3).to(DEVICE, torch.float64)
    part = images[_own_part()].clone().requires_grad_()
    norm(part).square().sum().backward()
    assert part.grad is not None
    assert whole.grad is not None
    assert torch.allclose(part.grad, whole.grad[_own_part()], atol=1e-10)
    assert norm.running_var is not None
    assert alone.running_var is not None
    assert torch.allclose(norm.running_var, alone.running_var, atol=1e-10)


def check_autograd_through_collectives() -> None:
    given = _random(hvd.rank(), 100).requires_grad_()
    hvd.allreduce(given, op=hvd.Sum).mul(hvd.rank() + 1.0).sum().backward()
    assert given.grad is not None
    _same(given.grad, torch.full((100,), 3.0, device=DEVICE))


def check_objects_and_states_of_the_device() -> None:
    told = {"rank": hvd.rank(), "numbers": list(range(1000))}
    assert hvd.broadcast_object(told, 0)["rank"] == 0
    assert [each["rank"] for each in hvd.allgather_object(told)] == [0, 1]
    model = _net(torch.float32, seed=hvd.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    _steps(model, optimizer, slice(None), torch.float32, count=1 + hvd.rank())
    reference = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = optimizer.state_dict()["state"]
    assert {int(each["step"]) for each in state.values()} == {1}
    moment = state[0]["exp_avg"]
    assert moment.device.type == DEVICE.type
    if hvd.rank() == 0:
        _same(moment, reference["state"][0]["exp_avg"])


def check_ddp_through_gloo_is_the_same() -> None:
    """Compare with DistributedDataParallel in the same workers, on the shared device."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if ON_GPU and not ON_CUDA:
        raise Skip("Gloo supports tensors of CUDA alone")
    dist.init_process_group("gloo")
    try:
        devices = [torch.accelerator.current_device_index()] if ON_GPU else None
        theirs = DistributedDataParallel(_net(torch.float64), device_ids=devices)
        _steps(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), _own_part(), torch.float64)
        ours = _net(torch.float64)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
        _steps(ours, optimizer, _own_part(), torch.float64)
        assert _distance(ours, theirs.module) < 1e-12, _distance(ours, theirs.module)
    finally:
        dist.destroy_process_group()


def check_memory_is_kept_for_as_long_as_it_is_read() -> None:
    """Check results whose inputs are released, and their memory reused, right after submission."""
    for number in range(size(40, 5)):
        count = size(1 << 22, 1 << 12)
        handles = []
        for part in range(4):
            tensor = torch.full((count,), float(number + part + hvd.rank()), device=DEVICE)
            handles.append(hvd.allreduce_async(tensor, op=hvd.Sum, name=f"kept.{part}"))
            tensor = torch.full((count,), -7.0, device=DEVICE)
        for part, handle in enumerate(handles):
            result = hvd.synchronize(handle)
            expected = 2.0 * (number + part) + 1
            assert bool((result == expected).all()), (number, part)


def check_shutdown_and_another_beginning() -> None:
    hvd.shutdown()
    hvd.init()
    _same(hvd.allreduce(torch.ones(10, device=DEVICE), op=hvd.Sum), torch.full((10,), 2.0, device=DEVICE))
    hvd.shutdown()


def main() -> int:
    return run_checks(dict(globals()))
