"""Losses that are means over something else than samples, such as tokens: `run.backward(loss, weight=)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.run.connect import TrainingWorld
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

draws = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(26, 3, generator=draws).double(), torch.randint(0, 9, (26,), generator=draws))
DATA.tensors[1][:4] = 0  # no tokens in the first batch of a worker, or of all


def _train(world: World, folder: Path, accumulate: int) -> tuple[list[float], list[float]]:
    """Return the weights after two epochs of steps of 10, 10 and 6 samples, and the recorded losses."""
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    torch.manual_seed(0)
    model = own.prepare(nn.Linear(3, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = own.loader(DATA, global_batch=10, accumulate=accumulate)
    run = own.run(folder / f"{world.size} {accumulate}", loader=train, model=model, optimizer=optimizer, log_every=1)
    for _ in run.epochs(2):
        for inputs, tokens in train:
            loss = (model(inputs).squeeze(1).square() * tokens).sum() / tokens.sum().clamp(min=1)
            run.backward(loss, weight=tokens.sum())
            if train.completes_step:
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss=loss)
    run.close()
    records = read_records(folder / f"{world.size} {accumulate}/metrics.jsonl") if world.is_main else []
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist(), losses


def test_weighted_batches_give_the_mean_over_all_tokens(tmp_path: Path) -> None:
    expected, losses = run_in_workers(1, _train, tmp_path, 1)[0]
    for size, accumulate in ((1, 3), (2, 2), (2, 3)):
        found = run_in_workers(size, _train, tmp_path, accumulate)
        assert found[0][1] == pytest.approx(losses, rel=1e-12)
        for weights, _ in found:
            assert weights == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("first", "second", "reads"), [(1, None, True), (None, 1, True), (1, 1, False)])
def test_a_step_with_other_weights_is_refused(first: Any, second: Any, reads: bool, tmp_path: Path) -> None:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    model = nn.Linear(3, 1).double()
    train = world.loader(DATA, global_batch=4, accumulate=2)
    run = world.run(tmp_path, loader=train, model=model)
    epochs = run.epochs(1)
    next(epochs)
    batches = iter(train)
    inputs, _ = next(batches)
    run.backward(model(inputs).mean(), weight=first)
    inputs, _ = next(batches) if reads else (inputs, None)
    with pytest.raises(ConfigError, match=r"weight=\): with accumulate=, call it once for each batch, with a weight"):
        run.backward(model(inputs).mean(), weight=second)
    run.close()
