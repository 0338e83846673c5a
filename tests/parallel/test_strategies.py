"""Strategies: the same training by other ways of keeping replicas equal, and what each adds."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import NETS, losses, small_digits, train_digits, weights_of
from simulated_gpu import gpu_world, on_gpus
from torch import nn
from worker_group import on_workers, run_in_workers

from lockstep.config.schema import ParallelConfig
from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.models.global_batch_norm import GlobalBatchNorm, check_batch_norm
from lockstep.run.connect import TrainingWorld
from lockstep.run.data_parallel import bare_forward
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.train.strategies.ddp import DistributedStrategy
from lockstep.train.strategies.horovod import HorovodStrategy
from lockstep.train.strategies.powersgd import PowerSGDStrategy
from lockstep.world.world import World

COMMON = {"max_steps": 20, "epochs": 2, "global_batch_size": 96, "log_every": 1, "lr": 0.1}


def _train(path: Path, size: int, net: str = "plain", **settings: Any) -> dict[str, torch.Tensor]:
    """The weights after 20 steps on `size` workers."""
    run_in_workers(size, train_digits, net, None, 100, {**COMMON, "run_dir": path, **settings})
    return weights_of(path)


def _distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


@pytest.mark.parametrize(
    ("net", "precision", "tolerance", "extra"),
    [
        ("plain", "fp64", 1e-10, {}),
        ("plain", "fp32", 2e-5, {"accumulate": 3, "clip_norm": 0.5}),
        ("normed", "fp64", 1e-10, {"sync_bn": True}),
    ],
)
def test_all_strategies_give_the_same_weights_after_20_steps(
    tmp_path: Path, net: str, precision: str, tolerance: float, extra: dict[str, Any]
) -> None:
    common = {"precision": precision, **extra}
    alone = {key: value for key, value in common.items() if key != "sync_bn"}
    single = _train(tmp_path / "single", 1, net, strategy="single", **alone)
    others = {
        "dp": _train(tmp_path / "dp", 1, net, strategy="dp", **alone),
        "ddp": _train(tmp_path / "ddp", 2, net, strategy="ddp", **common),
        "horovod": _train(tmp_path / "horovod", 2, net, strategy="horovod", **common),
        "horovod on 3": _train(tmp_path / "horovod3", 3, net, strategy="horovod", **common),
        "ddp, sharded": _train(tmp_path / "zero", 2, net, strategy="ddp", shard_optimizer=True, **common),
    }
    start, *_, end = losses(tmp_path / "single")
    assert end < 0.9 * start
    assert {name: _distance(weights, single) for name, weights in others.items()} == pytest.approx(
        dict.fromkeys(others, 0.0), abs=tolerance
    )


def test_sync_bn_with_accumulation_takes_equal_passes_everywhere(tmp_path: Path) -> None:
    common: dict[str, Any] = {**COMMON, "sync_bn": True, "accumulate": 16, "global_batch_size": 64, "epochs": 1}
    for strategy in ("ddp", "horovod"):  # the second and last step has 29 samples: 14 and 15
        settings = {**common, "precision": "fp64", "strategy": strategy, "run_dir": tmp_path / strategy}
        run_in_workers(2, train_digits, "normed", 64 + 29, 100, settings)
    assert _distance(weights_of(tmp_path / "ddp"), weights_of(tmp_path / "horovod")) < 1e-10


def test_sync_bn_refuses_a_step_without_samples_for_a_worker(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"an epoch has 2 samples for 3 workers.* add --drop-last"):
        _train(tmp_path, 3, "normed", sync_bn=True, global_batch_size=41, max_steps=36)


@pytest.mark.usefixtures("simulated_gpu")
@on_gpus(2)
def test_ddp_on_gpus_needs_no_inputs_to_settle_its_buckets(world: World) -> None:
    with gpu_world() as ours:
        strategy = DistributedStrategy(ours, ParallelConfig())
        replica = strategy.wrap(nn.Linear(2, 1).to(ours.device))
        replica(torch.full((1, 2), float(world.rank), device=ours.device)).sum().backward()
        with bare_forward(replica.module):
            replica().backward()  # adds zeros, as the studies of a step do
        assert replica.module.weight.grad.flatten().tolist() == [0.5, 0.5]


class Counting(nn.BatchNorm2d):
    """More than a batch norm: its buffer goes into the forward pass."""


def _statistics(world: World, net: str, broadcasts: bool | None) -> tuple[bool, list[list[float]]]:
    """Whether DDP broadcasts buffers before each forward pass, and this worker's after three steps of training."""
    torch.manual_seed(0)
    model = NETS[net]() if net in NETS else nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), Counting(1))
    replica: Any = DistributedStrategy(world, ParallelConfig()).wrap(model)
    broadcast = replica.broadcast_buffers
    if broadcasts is not None:
        replica.broadcast_buffers = broadcasts
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + world.rank)
        replica(torch.randn(4, 1, 8, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return broadcast, [buffer.flatten().tolist() for buffer in model.buffers()]


@on_workers(2)
def test_strategies_name_phases_in_which_they_wait_for_workers(world: World) -> None:
    plain, buffers, sharded = (
        DistributedStrategy(world, ParallelConfig(shard_optimizer=shards)) for shards in (False, False, True)
    )
    plain.wrap(NETS["normed"]())
    buffers.wrap(nn.Sequential(nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), Counting(1)))
    powersgd = PowerSGDStrategy(world, ParallelConfig(compress="powersgd"), 10, 0)
    more: list[tuple[str, ...]] = [(), ("forward",), ("optimizer",), ("backward",)]
    for strategy, phases in zip((plain, buffers, sharded, powersgd), more, strict=True):
        assert strategy.waits_in == ("reduction", *phases)


def test_ddp_broadcasts_no_buffers_if_all_are_batch_norms() -> None:
    (off, first), (_, second) = run_in_workers(2, _statistics, "normed", None)
    (_, expected), (_, broadcast) = run_in_workers(2, _statistics, "normed", True)
    assert not off
    assert first == expected
    assert first != second != broadcast  # each worker has its own, until they are broadcast for an evaluation


def test_ddp_broadcasts_buffers_of_modules_that_may_read_them() -> None:
    assert [on for on, _ in run_in_workers(2, _statistics, "counting", None)] == [True, True]


class Activated(nn.BatchNorm2d):
    """More than a batch norm."""


def test_sync_bn_refuses_a_norm_that_does_more() -> None:
    with pytest.raises(ConfigError, match=r"cannot replace Activated \(layer 0\)"):
        check_batch_norm(nn.Sequential(Activated(3)))


class Shared(nn.Module):
    """One batch norm under two names, and in a plain list; other norms are in the list alone."""

    def __init__(self, *hidden: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.norm = self.again = nn.BatchNorm1d(3)
        self.listed = [self.norm, *hidden]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.again(self.second(self.norm(self.first(values))))
        for norm in self.listed:
            values = norm(values)
        return values


@on_workers(2)
def test_sync_bn_converts_a_norm_under_all_its_names(world: World) -> None:
    torch.manual_seed(0)
    whole, model, calls = Shared().double(), Shared().double(), list[int]()
    model.load_state_dict(whole.state_dict())
    model.norm.note = "kept"
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    norm, values = model.norm, torch.randn(8, 4, dtype=torch.float64)
    prepared = TrainingWorld(world.rank_info, world.device).prepare(model, sync_bn=True)
    for shares in ([2, 6], [5, 3]):
        expected, output = whole(values), prepared(values.split(shares)[world.rank])
        torch.testing.assert_close(output, expected.split(shares)[world.rank])
    torch.testing.assert_close(model.norm.running_var, whole.norm.running_var)
    assert model.norm is model.again is model.listed[0] is norm
    assert (model.norm.note, len(calls)) == ("kept", 6)
    assert isinstance(copy.deepcopy(prepared).module.norm, GlobalBatchNorm)


@on_workers(2, hidden=[nn.BatchNorm1d(3), lambda values: F.batch_norm(values, None, None, training=True)])
def test_sync_bn_refuses_a_norm_that_it_cannot_find(hidden: Any, world: World) -> None:
    for strategy in (DistributedStrategy(world, ParallelConfig()), HorovodStrategy(world, "none")):
        model = Shared(hidden)
        strategy.synchronize_batch_norm(model)
        with pytest.raises(
            ConfigError, match=r"has not replaced a batch norm of 3 features \(.*test_strategies.py:\d+"
        ):
            model(torch.randn(4, 4))
        model.eval()(torch.randn(4, 4))


@on_workers(2)
def test_sync_bn_accepts_a_list_of_norms_in_evaluation_mode(world: World) -> None:
    model = Shared(nn.BatchNorm1d(3).eval())
    DistributedStrategy(world, ParallelConfig()).synchronize_batch_norm(model)
    model(torch.randn(4, 4))
    pickle.dumps(model)


KINDS = (torch.uint16, torch.uint64, torch.int16, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex64)


class Tables(nn.Module):
    """Buffers of unusual dtypes and layouts, and a frozen parameter; a forward pass assigns new tensors to some."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for kind in KINDS:
            self.register_buffer(f"table_{kind}".replace("torch.", ""), torch.full((3,), value).to(kind))
        self.register_buffer("expanded", torch.full((1, 3), float(value)).expand(4, 3))
        self.register_buffer("conjugated", torch.full((3,), value * 1j).conj())
        self.register_buffer("negative", torch.full((1,), value * 1j).conj().imag)  # with a stride of 2
        self.register_buffer("scalar", torch.tensor(value, dtype=torch.uint32), persistent=False)
        self.frozen = nn.Parameter(torch.full((2,), value).to(torch.float8_e5m2), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen = [tensor.tolist() for tensor in (self.table_uint16, self.expanded, self.scalar)]
        own = int(values.sum())
        self.table_uint16 = torch.full((3,), own).to(torch.uint16)
        self.expanded = torch.full((1, 3), float(own)).expand(4, 3)
        return self.layer(values)

    def all(self) -> list[Any]:
        return [each.detach().to(torch.complex128).tolist() for each in [*self.buffers(), self.frozen]]


@on_workers(2)
def test_tensors_of_any_dtype_and_layout_become_rank_0s(world: World) -> None:
    expected = Tables(0).all()
    for strategy in (DistributedStrategy(world, ParallelConfig()), HorovodStrategy(world, "none")):
        model = Tables(world.rank)
        strategy.broadcast([*model.parameters(), *model.buffers()])
        assert model.all() == expected
    prepared: Any = TrainingWorld(world.rank_info, world.device).prepare(Tables(world.rank))
    assert prepared.module.all() == expected
    prepared(torch.full((1, 2), 4.0 + world.rank))
    prepared(torch.zeros(1, 2))
    assert prepared.module.seen == [[8] * 3, [[8.0] * 3] * 4, 0]  # as rank 0 had assigned


def _train_other_models(world: World, path: Path, strategy: str) -> None:
    width = 20 - 10 * world.rank
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
    run_with(configure(strategy=strategy, track=(), run_dir=path, batch_size=8), world, small_digits(40, 10), model)


@pytest.mark.parametrize("strategy", ["ddp", "horovod"])
def test_models_of_different_shapes_are_refused_on_every_worker(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_in_workers(2, _train_other_models, tmp_path / "run", strategy)
    said = "worker 1's model differs from worker 0's: 1.weight of shape [10, 64] instead of 1.weight of shape"
    assert str(caught.value).count(f"{said} [20, 64]") == 2


def _train_from_other_seeds(world: World, path: Path, settings: dict[str, Any]) -> float:
    torch.manual_seed(world.rank)
    model = NETS["plain"]()
    run_with(configure(**{**COMMON, "track": (), "run_dir": path, **settings}), world, small_digits(96, 24), model)
    return sum(parameter.detach().double().sum().item() for parameter in model.parameters())


@pytest.mark.parametrize(
    "settings", [{"precision": "O2"}, {"strategy": "horovod"}, {"strategy": "horovod", "precision": "O2"}]
)
def test_replicas_from_different_seeds_become_rank_0s(tmp_path: Path, settings: dict[str, Any]) -> None:
    few = {"max_steps": 2, "global_batch_size": 24, **settings}
    first, second = run_in_workers(2, _train_from_other_seeds, tmp_path / "run", few)
    assert first == second


def test_without_sync_bn_statistics_differ_from_the_whole_batchs(tmp_path: Path) -> None:
    single = _train(tmp_path / "single", 1, "normed", precision="fp64")
    assert _distance(_train(tmp_path / "ddp", 2, "normed", precision="fp64"), single) > 1e-4


def _bytes(path: Path) -> list[tuple[int, int]]:
    steps = [record for record in read_records(path / "metrics.jsonl") if record["kind"] == "step"]
    return [(record["gradient_bytes"], record["sent_bytes"]) for record in steps]


@pytest.mark.parametrize("strategy", ["ddp", "horovod"])
def test_half_precision_gradients_halve_the_bytes(tmp_path: Path, strategy: str) -> None:
    plain = _train(tmp_path / "plain", 2, strategy=strategy)
    parameters = sum(tensor.numel() for tensor in plain.values())
    for compress, tolerance in (("fp16", 2e-3), ("bf16", 2e-2)):
        half = _train(tmp_path / compress, 2, strategy=strategy, compress=compress)
        assert 0 < _distance(half, plain) < tolerance
        assert _bytes(tmp_path / compress) == [(4 * parameters, 2 * parameters)] * 20
    with pytest.raises(KeyError):
        _bytes(tmp_path / "plain")


def test_powersgd_starts_within_the_run_saves_bytes_and_learns(tmp_path: Path) -> None:
    _train(tmp_path / "run", 2, compress="powersgd", powersgd_rank=2, epochs=2)
    whole, rest = _bytes(tmp_path / "run")[:2], _bytes(tmp_path / "run")[2:]
    assert all(plain == sent for plain, sent in whole)  # a tenth of 20 steps
    assert len(rest) == 18
    assert all(sent < plain / 8 for plain, sent in rest)
    start, *_, end = losses(tmp_path / "run")
    assert end < 0.9 * start


def test_powersgd_keeps_one_order_over_several_buckets(tmp_path: Path) -> None:
    _train(tmp_path / "run", 3, "wide", compress="powersgd", lr=0.02)
    course = losses(tmp_path / "run")
    assert len(course) == 20
    assert course[-1] < 0.9 * course[0]


def _stop_and_resume(tmp_path: Path, first: int, then: int, **settings: Any) -> dict[str, torch.Tensor]:
    run = {**COMMON, "run_dir": tmp_path / f"{first}-{then}", **settings}
    run_in_workers(first, train_digits, "plain", None, 100, {**run, "max_steps": 9})
    run_in_workers(then, train_digits, "plain", None, 100, {**run, "resume": "auto"})
    return weights_of(tmp_path / f"{first}-{then}")


def test_powersgd_resumes_to_the_bit_with_every_workers_error(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"compress": "powersgd", "powersgd_rank": 1}
    whole = _train(tmp_path / "whole", 2, **settings)
    assert _distance(_stop_and_resume(tmp_path, 2, 2, **settings), whole) == 0.0
    fewer = _stop_and_resume(tmp_path, 2, 1, **settings)  # one worker has nothing to compress
    assert 0 < _distance(fewer, whole) < 0.1
    assert _distance(_stop_and_resume(tmp_path, 2, 3, **settings), whole) < 0.1


@pytest.mark.parametrize("then", [{"precision": "fp32"}, {"precision": "O1", "loss_scale": 64.0}])
def test_powersgds_error_goes_over_to_another_loss_scale(tmp_path: Path, then: dict[str, Any]) -> None:
    first: dict[str, Any] = {"precision": "O1", "loss_scale": 8192.0, "max_steps": 7}
    run = {**COMMON, "run_dir": tmp_path / "run", "compress": "powersgd", "max_steps": 10, "global_batch_size": 24}
    run_in_workers(2, train_digits, "plain", 120, 24, {**run, **first})
    run_in_workers(2, train_digits, "plain", 120, 24, {**run, **then, "resume": "auto"})
    course = losses(tmp_path / "run")
    assert len(course) == 10
    assert max(course[7:]) < course[0]


@pytest.mark.parametrize(
    ("optimizer", "sizes"), [("sgd", [(2, 3)]), ("adamw", [(2, 3), (3, 1), (1, 2)]), ("lamb", [(2, 3)])]
)
def test_sharded_checkpoint_resumes_on_any_number_of_workers(
    tmp_path: Path, optimizer: str, sizes: list[tuple[int, int]]
) -> None:
    settings: dict[str, Any] = {"precision": "fp64", "optimizer": optimizer, "lr": 0.01, "decay_all": False}
    whole = _train(tmp_path / "whole", 1, **settings)
    for first, then in sizes:
        resumed = _stop_and_resume(tmp_path, first, then, strategy="ddp", shard_optimizer=True, **settings)
        assert _distance(resumed, whole) < 1e-10, (first, then)
