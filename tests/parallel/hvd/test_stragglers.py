"""Real workers measure their steps, and rank 0 names a slow rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from time_limits import Limit
from torch import nn
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.diagnosis.phases import BEFORE_BACKWARD, Phases
from lockstep.files.jsonl import read_records
from lockstep.hvd.engine import context as engine
from lockstep.world.world import World

LOADING_SECONDS = 0.02


def _optimizer(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **options)


def test_rank_with_a_slow_loader_is_named_and_recorded(tmp_path: Path) -> None:
    """Its peer waits as long in every step, in the reduction and for the metric, and is not named."""
    file = tmp_path / "steps/metrics.jsonl"

    def work(world: World) -> None:
        os.environ |= {"LOCKSTEP_STRAGGLER_SECONDS": "0.2", "LOCKSTEP_OBSERVE": str(file.parent)}
        hvd.init()
        model = nn.Linear(4, 1)
        optimizer = _optimizer(model)
        limit = Limit()
        is_named = torch.zeros(1)
        while not is_named:
            assert limit.left()
            if hvd.rank() == 1:
                time.sleep(LOADING_SECONDS)  # before the metric, for which rank 0 waits
            found = hvd.rank() == 0 and file.exists() and '"straggler"' in file.read_text()
            is_named = hvd.allreduce(torch.tensor([float(found)]), op=hvd.Max, name="metric")
            if hvd.rank() == 1:
                time.sleep(LOADING_SECONDS)  # after it, so that rank 0 waits for the gradients
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        hvd.shutdown()

    run_in_workers(2, work)
    named = [(each["ranks"], each["phase"]) for each in read_records(file) if each["kind"] == "straggler"]
    assert named == [([1], BEFORE_BACKWARD)]


def test_steps_are_not_measured_if_that_is_disabled() -> None:
    def work(world: World) -> bool:
        os.environ["LOCKSTEP_STRAGGLER_SECONDS"] = "0"
        hvd.init()
        model = nn.Linear(4, 1)
        optimizer = _optimizer(model)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return bool(engine.get().step_times.take_ready())

    assert run_in_workers(2, work) == [False, False]


def test_optimizer_is_measured_after_hvd_is_initialized_again() -> None:
    def work(world: World) -> list[bool]:
        model = nn.Linear(4, 1)
        optimizer: Any = None
        measured = []
        for _ in range(2):
            hvd.init()
            optimizer = optimizer or _optimizer(model)
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            measured.append(bool(engine.get().step_times.take_ready()))
            hvd.shutdown()
        return measured

    assert run_in_workers(2, work) == [[True, True]] * 2


def test_a_closure_is_measured_in_its_phases() -> None:
    def work(world: World) -> Sequence[Phases]:
        hvd.init()
        model = nn.Linear(4, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=2))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            time.sleep(0.02)
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return engine.get().step_times.take_ready()

    for steps in run_in_workers(2, work):
        assert steps
        assert all(step[BEFORE_BACKWARD] > 0.02 for step in steps)
