"""Workers that do not do the same: that leave the loader's pass after different steps, or make a call alone."""

from __future__ import annotations

import re
import threading
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from waiting import Lines
from worker_group import run_in_workers

from lockstep.errors import ConfigError
from lockstep.run.connect import TrainingWorld
from lockstep.run.pass_end import PassEnd
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

ANOTHER_STEP = "worker 0 has left the loader's pass after step 3 of the epoch, and worker 1 after step"


def _ends() -> list[PassEnd]:
    store = HashStore()
    worlds = [SimpleNamespace(size=2, rank=rank, store=lambda: store) for rank in range(2)]
    ends = [PassEnd(world) for world in worlds]  # type: ignore[arg-type]
    for end in ends:
        end.note_seconds = 0.0
    return ends


def test_pass_of_an_earlier_epoch_does_not_count() -> None:
    ends = _ends()
    ends[1].note(0, 3, is_early=True)
    ends[0].note(1, 3, is_early=True)
    waits = threading.Thread(target=ends[0].compare)
    with redirect_stderr(Lines()) as lines:
        waits.start()
        lines.wait_for("waits for worker 1, which has not; all workers")
        ends[1].note(1, 3, is_early=False)
        waits.join(60)
    assert not waits.is_alive()


def test_pass_may_be_left_after_a_stop_has_disconnected() -> None:
    world = SimpleNamespace(size=2, rank=0, store=HashStore)
    end = PassEnd(world)  # type: ignore[arg-type]
    world.store = World(RankInfo(0, 2, 0, 2), torch.device("cpu")).store
    with pytest.raises(ValueError, match="has not been initialized"):
        world.store()
    end.note(0, 3, is_early=True)


def test_different_steps_are_an_error() -> None:
    ends = _ends()
    ends[0].note(0, 3, is_early=True)
    ends[1].note(0, 8, is_early=False)
    with pytest.raises(ConfigError, match=rf"{ANOTHER_STEP} 8; .*world\.mean"):
        ends[0].compare()


def _sum_after_leaving(world: World, folder: Path, steps: list[int]) -> str:
    """Train a model that no collective holds together, leave the pass after this worker's step; then add numbers."""
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = own.loader([torch.ones(1)] * 16, 1)
    run = own.run(folder, loader=train, model=model, optimizer=optimizer, check_replicas=0)
    try:
        for _ in run.epochs(2):
            for number, batch in enumerate(train, start=1):
                run.backward(model(batch).sum())
                optimizer.step()
                run.step()
                if number == steps[own.rank]:
                    break
            total = own.sum(1.0)
    except (ConfigError, RuntimeError) as error:  # that of torch: its peer has left
        return str(error)
    return f"{total:g}"


@pytest.mark.parametrize(("steps", "results"), [([3, 3], ("2", "2")), ([8, 8], ("2", "2")), ([3, 5], (ANOTHER_STEP,))])
def test_sum_after_a_pass(steps: list[int], results: tuple[str, ...], tmp_path: Path) -> None:
    found = run_in_workers(2, _sum_after_leaving, tmp_path / "run", steps)
    for text, expected in zip(found, results, strict=False):
        assert text.startswith(expected)


def _call_alone(world: World, folder: Path, name: str, is_passing: bool) -> str:
    """Make a call on worker 0 alone, in the first step or after the pass; return the error of this worker."""
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = own.loader([torch.ones(1)] * 16, 1)
    run = own.run(folder, loader=train, model=model, optimizer=optimizer, check_replicas=0)
    calls = {"TrainingRun.save": lambda: run.save(best=True), "TrainingWorld.mean": lambda: own.mean(1.0)}
    calls["World.gather"] = lambda: own.gather(1)
    try:
        for _ in run.epochs(2):
            for batch in train:
                run.backward(model(batch).sum())
                optimizer.step()
                run.step()
                if own.is_main and is_passing:
                    calls[name]()
            if own.is_main:
                calls[name]()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["TrainingRun.save", "TrainingWorld.mean", "World.gather"])
@pytest.mark.parametrize(("is_passing", "other"), [(True, "TrainingRun.step"), (False, "TrainingRun.epochs")])
def test_call_of_one_worker_is_refused_with_both_lines(name: str, is_passing: bool, other: str, tmp_path: Path) -> None:
    found = run_in_workers(2, _call_alone, tmp_path / "run", name, is_passing)
    for text in found:
        for each in (f"worker 0 in {name} ", f"worker 1 in {other} "):
            assert re.search(rf"{re.escape(each)}\(\S*test_pass_end\.py:\d+\)", text), text
