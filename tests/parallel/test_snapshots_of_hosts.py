"""Snapshots in memory on several hosts, here workers with a folder each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

from lockstep.run.connect import TrainingWorld
from lockstep.world.world import World

DATA = TensorDataset(torch.arange(48.0).view(24, 2) / 48)


def _loop(world: World, folder: Path, restart: int, lost: int | None) -> tuple[int, float, dict[str, int]]:
    """Train to step 5 of 6, or resume on the hosts of which one has lost its memory; return the state at the start."""
    host = world.rank if lost is None else world.rank + (world.rank >= lost)
    memory = folder / f"memory.{host}"
    info = replace(world.rank_info, local_rank=0, local_size=1, snapshots=memory, restart=restart)
    with TrainingWorld(info, world.device, world.host_group) as own:
        torch.manual_seed(0)
        model = own.prepare(nn.Linear(2, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = own.loader(DATA, global_batch=4)
        run = own.run(folder / "run", loader=train, log_every=2, checkpoint_epochs=0, model=model, optimizer=optimizer)
        began = run.step_count, sum(float(each.detach().sum()) for each in model.parameters()), dict(run.extra)
        for _ in run.epochs(1):
            for (inputs,) in train:
                if run.step_count == 5:
                    return began
                run.extra["rank"] = world.rank
                optimizer.zero_grad()
                run.backward(model(inputs.double()).square().mean())
                optimizer.step()
                run.step()
    return began


@pytest.mark.parametrize("lost", [0, 1])
def test_own_loop_goes_on_from_a_snapshot_of_a_host_that_is_left(tmp_path: Path, lost: int) -> None:
    run_in_workers(3, _loop, tmp_path, 0, None)
    found = run_in_workers(2, _loop, tmp_path, 1, lost)
    assert found[0] == found[1]
    assert found[0][0] == 4
    assert found[0][2] == {"rank": 1 if lost == 0 else 0}
