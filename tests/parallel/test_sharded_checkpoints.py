"""Checkpoints of sharded tensors, written by several workers: `lockstep.run.checkpoints.sharded`."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset
from worker_group import on_workers, run_in_workers

from lockstep.errors import LockstepError
from lockstep.models.nested import map_tensors
from lockstep.run.checkpoints import checkpoint_format, sharded
from lockstep.run.checkpoints.checkpoint_folder import load_model, newest, newest_sound
from lockstep.run.checkpoints.sharded import file_of, place_of
from lockstep.run.connect import TrainingWorld
from lockstep.world.world import World

generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(120, 5, generator=generator), torch.randint(0, 3, (120,), generator=generator))
PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Shard(1)],
    [Shard(1), Replicate()],
    [Replicate(), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(-1), Shard(0)],
]


def _train(world: World, folder: Path, steps: int, broken: str = "") -> tuple[dict[str, Any], list[str]]:
    """Train up to a number of steps, with a checkpoint after each; return the whole state, and the lines printed."""
    lines: list[str] = []
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()
    mesh = dist.init_device_mesh("cpu", (world.size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = own.loader(DATA, global_batch=12, shuffle=True)
    run = own.run(folder, loader=train, checkpoint_steps=1, keep=3, model=model, optimizer=optimizer)
    run._session.checkpoints.report_to(lines.append, run._session.stopping.writing)
    if world.rank == 1 and broken:
        _break(broken)
    for _ in run.epochs(1):
        for inputs, labels in train:
            if run.step_count == steps:
                break
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(inputs.double()), labels))
            optimizer.step()
            run.step()
        break
    run.close()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    whole = _whole(states)
    if world.size == 1:
        dist.destroy_process_group()  # made by the mesh
    return whole, lines


def _break(how: str) -> None:
    """Let this worker's second write fail."""
    write, saves = checkpoint_format.write_own_shards, []

    def write_or_fail(path: Path, *arguments: Any) -> Any:
        saves.append(path)
        if len(saves) == 2:
            if how == "full disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            path = path.with_name("elsewhere")
        return write(path, *arguments)

    checkpoint_format.write_own_shards = write_or_fail


def _whole(state: Any) -> Any:
    return map_tensors(lambda each: (each.full_tensor() if isinstance(each, DTensor) else each).tolist(), state)


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (3, 1), (1, 2)])
def test_any_number_of_workers_resumes(writers: int, readers: int, tmp_path: Path) -> None:
    before = run_in_workers(writers, _train, tmp_path / "run", 4)
    path = newest(tmp_path / "run/checkpoints")
    assert path
    assert {file.name for file in path.iterdir()} >= {file_of(rank) for rank in range(writers)} | {"shards.json"}
    for state, _ in run_in_workers(readers, _train, tmp_path / "run", 4):
        assert state == before[0][0]
    weights, _ = load_model(path)
    assert _whole(weights) == before[0][0]["model"]


@pytest.mark.parametrize(
    ("how", "message"), [("full disk", "worker 1: No space left"), ("not seen", "all workers must see the run folder")]
)
def test_a_part_that_is_not_written_leaves_the_checkpoint_out(how: str, message: str, tmp_path: Path) -> None:
    (_, lines), (_, none) = run_in_workers(2, _train, tmp_path / "run", 4, how)
    assert not none
    (line,) = lines
    assert message in line
    assert line.startswith("checkpoint of step 2 was not written")
    names = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert sorted(names) == ["step-00000001", "step-00000003", "step-00000004"]


@pytest.mark.parametrize("what", ["a damaged part", "a missing part", "a damaged index"])
def test_damage_is_found(what: str, tmp_path: Path) -> None:
    run_in_workers(2, _train, tmp_path / "run", 2)
    path = newest(tmp_path / "run/checkpoints")
    assert path
    target = path / ("shards.json" if "index" in what else file_of(1))
    content = target.read_bytes()
    target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if "missing" in what:
        target.unlink()
    found, (line,) = newest_sound(tmp_path / "run/checkpoints")
    assert found
    assert found.name == "step-00000001"
    assert target.name in line


def _parts(state: Any) -> Any:
    """Return this worker's parts: full_tensor() of torch 2.8 orders those of FSDP with tensor parallelism wrongly."""
    return map_tensors(lambda each: (each.to_local() if isinstance(each, DTensor) else each).tolist(), state)


class _Application:
    """States in one object, as for torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> Any:
        return {"model": self.model.state_dict(), "list": [3 * each.detach() for each in self.model.parameters()]}

    def load_state_dict(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        assert all(isinstance(each, DTensor) for each in state["list"])


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu())  # type: ignore[no-any-return]


class _WithHistory(torch.optim.SGD):
    """Keeps a list of tensors for each parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("history", []).append(parameter.detach().clone())


def _build(kind: str) -> dict[str, Any]:
    """Return a model and other states that are sharded over four workers."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    model = (
        _Tied() if kind == "tied parameters" else nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    )
    if kind == "tensor parallel":
        parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh if kind == "replicas in the mesh" else mesh["a"])
    if kind == "in an object":
        return {"application": _Application(model)}
    make = _WithHistory if kind == "lists" else torch.optim.SGD
    return {"model": model, "optimizer": make(model.parameters(), lr=0.1, momentum=0.9)}


@on_workers(
    4,
    kind=["replicas in the mesh", "replicas of a mesh", "tensor parallel", "tied parameters", "lists", "in an object"],
)
def test_states_sharded_in_other_ways_are_restored(world: World, kind: str, tmp_path: Path) -> None:
    own, found = TrainingWorld(world.rank_info, world.device, world.host_group), []
    for has_saved in (False, True):
        state = _build(kind)
        run = own.run(tmp_path / kind, **state)
        if not has_saved:
            if optimizer := state.get("optimizer"):
                state["model"](torch.ones(2, 6)).sum().backward()
                optimizer.step()
            run.step()
            parameter = next(getattr(state.get("application"), "model", state.get("model")).parameters())
            run.extra["parts"], parts, place = parameter, parameter.to_local().detach().clone(), place_of(parameter)
            run.save()
        found.append(_parts([each.state_dict() for each in state.values()]))
        if has_saved:
            start, sizes, _ = place
            part = run.extra["parts"][tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))]
            assert torch.equal(part, parts)
        run.close()
    saved, restored = found
    assert restored == saved


def _save_badly(world: World, folder: Path, how: str) -> str:
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    model = nn.Linear(6, 6)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "not seen":
        if world.rank:
            Path.exists = lambda *_, **__: False  # type: ignore[method-assign]
        with pytest.raises(LockstepError) as refused:
            own.run(folder, model=model)
        return str(refused.value)
    run = own.run(folder, model=model, optimizer=optimizer)
    part: Any = model.weight
    if how == "NaN":
        with torch.no_grad():
            part.to_local().fill_(torch.nan if world.rank else 0)
    else:
        optimizer.state[model.weight]["momentum"] = torch.zeros_like(part.to_local())
    run.step()
    with pytest.raises(LockstepError) as refused:
        run.save()
    run.close()
    return str(refused.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("NaN", "the weights are NaN or infinite after step 1"),
        ("plain parts", "optimizer: momentum has the shape of one worker's part"),
        ("not seen", "of worker 0 is not seen by worker 1"),
    ],
)
def test_what_cannot_be_saved_is_refused_on_all_workers(how: str, message: str, tmp_path: Path) -> None:
    for error in run_in_workers(2, _save_badly, tmp_path, how):
        assert message in error


def _save_slowly(world: World, folder: Path) -> None:
    """Close a run while the other worker takes longer for its part than a failed run would wait."""
    sharded.CLOSING_SECONDS = 0.1
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    model = nn.Linear(6, 6)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world.size,)))
    write = checkpoint_format.write_own_shards

    def write_late(*arguments: Any) -> Any:
        time.sleep(1.0)
        return write(*arguments)

    checkpoint_format.write_own_shards = write_late
    run = own.run(folder, model=model)
    run.step()
    run.save()
    run.close()


def test_a_closed_run_waits_for_the_parts_of_others(tmp_path: Path) -> None:
    run_in_workers(2, _save_slowly, tmp_path / "run")
    assert newest(tmp_path / "run/checkpoints")


@on_workers(4)
def test_the_places_of_parts_are_those_of_torch(world: World) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for placements in PLACEMENTS:
        for shape in ((4, 6), (5, 3), (1, 7)):
            whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
            tensor = distribute_tensor(whole, mesh, placements)
            place = place_of(tensor)
            assert place
            start, sizes, stores = place
            part = whole[tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))]
            assert torch.equal(tensor.to_local(), part), (placements, shape)
            stored = torch.tensor(float(part.sum() if stores else 0.0))
            assert world.sum_(stored) == whole.sum(), (placements, shape)
    assert place_of(DTensor.from_local(torch.ones(2), mesh, [dist.tensor.Partial(), Replicate()])) is None


@pytest.fixture(scope="module")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_in_workers(2, _train, folder, 1)
    path = newest(folder / "checkpoints")
    assert path
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [7, 50]}, "not the whole tensor"),
        ({"shape": [-7, -5]}, "invalid size"),
        ({"shape": [True]}, "invalid size"),
        ({"parts": [["../secret", [0, 0], [7, 5]]]}, "invalid name"),
        ({"parts": [["shard-00009.safetensors", [0, 0], [7, 5]]]}, "not the whole tensor"),
        ({"parts": [["shard-00000.safetensors", [4, 0], [7, 5]]]}, "not the whole tensor"),
        ({"parts": [["shard-00000.safetensors", [0, 0], [7, 5]]]}, "has another shape"),
        ({"parts": [["shard-00000.safetensors", [0], [35]]]}, "not the whole tensor"),
        ({"shape": [1 << 40], "parts": [["shard-00000.safetensors", [0], [1 << 40]]]}, "larger than the files"),
        ({"parts": 5}, "is damaged"),
        ({"shape": [0, 5], "parts": []}, "not the whole tensor"),
        ({"parts": 2 * [["shard-00000.safetensors", [0, 0], [4, 5]]], "shape": [8, 5]}, "not the whole tensor"),
    ],
)
def test_a_hostile_index_is_refused(
    change: dict[str, Any], message: str, sharded_checkpoint: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(sharded_checkpoint, tmp_path / "step-1")
    index = json.loads((path / "shards.json").read_text())
    index["model:0.weight"] |= change
    (path / "shards.json").write_text(json.dumps(index))
    with pytest.raises(checkpoint_format.CheckpointError, match=re.escape(message)):
        checkpoint_format.load(path, verified=True)
