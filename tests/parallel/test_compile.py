"""--compile compiles under DistributedDataParallel too, and trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import losses, train_digits
from torch._dynamo.utils import counters
from worker_group import run_in_workers

from lockstep.world.world import World


def _train(world: World, settings: dict[str, Any]) -> int:
    before = counters["stats"]["unique_graphs"]  # a worker is forked from the tests' process, which may have compiled
    train_digits(world, "plain", 120, 10, settings)
    return counters["stats"]["unique_graphs"] - before


@pytest.mark.filterwarnings("default")  # torch's compiler warns of itself, of other things with each version
def test_compiled_training_is_the_same_training(tmp_path: Path) -> None:
    graphs = {}
    for compiled in (False, True):
        settings = {"run_dir": tmp_path / str(compiled), "epochs": 2, "batch_size": 20, "log_every": 1, "lr": 0.1}
        graphs[compiled] = run_in_workers(2, _train, {**settings, "compile": compiled})
    assert graphs[False] == [0, 0]
    assert min(graphs[True]) > 0
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-4)
    assert len(losses(tmp_path / "True")) == 6
