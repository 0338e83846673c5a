"""Frozen parameters, and fit's own parts, in every strategy and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import losses, normed_net, small_digits, weights_of
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

from lockstep.train import fit
from lockstep.world.world import World

SETTINGS: dict[str, Any] = {
    "epochs": 1,
    "global_batch_size": 60,
    "max_steps": 6,
    "lr": 0.02,
    "log_every": 1,
    "momentum": 0.5,
    "schedule": "constant",
    "loader_workers": 0,
    "track": (),
    "io_every": 0,
    "weight_decay": 0.1,
}


def _fit(world: World, path: Path, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Train all but the first layer; returns the metrics."""
    data = small_digits(360, 100)
    train, val = (TensorDataset(split.images / 255, split.labels) for split in (data.train, data.val))
    torch.manual_seed(0)
    model = normed_net()
    model[0].requires_grad_(False)  # type: ignore[operator]
    result = fit(
        model,
        train,
        val,
        loss=F.cross_entropy,
        metrics={"right": lambda outputs, targets: ((outputs.argmax(1) == targets).sum(), len(targets))},
        run_dir=path,
        **{**SETTINGS, **settings},
    )
    assert result.metrics["right"] == result.top1
    assert result.confusion_matrix is not None
    assert result.confusion_matrix.diagonal().sum() == round(result.top1 * 100)
    return {split: getattr(result.history, split)["loss"].tolist() for split in ("train", "val")}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (1, {"strategy": "single"}),
        (1, {"strategy": "dp"}),
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "ddp", "shard_optimizer": True}),
        (2, {"strategy": "horovod"}),
    ],
    ids=["single", "dp", "ddp", "sharded", "horovod"],
)
def test_frozen_parameters_stay_and_the_others_learn(
    tmp_path: Path, workers: int, strategy: dict[str, Any], precision: str
) -> None:
    torch.manual_seed(0)
    before = normed_net().state_dict()
    averaged = {} if precision == "O3" else {"ema_decay": 0.5}
    results = run_in_workers(workers, _fit, tmp_path, {"precision": precision, **strategy, **averaged})
    assert all(result == results[0] for result in results)
    course = losses(tmp_path)
    assert min(course[-2:]) < 0.9 * course[0]
    after = weights_of(tmp_path)
    dtype = after["0.weight"].dtype
    assert torch.equal(after["0.weight"], before["0.weight"].to(dtype))
    assert not torch.equal(after["4.weight"], before["4.weight"].to(dtype))


def test_frozen_run_with_mean_loss_is_equal_on_1_2_and_3_workers(tmp_path: Path) -> None:
    settings = {"precision": "fp64", "sync_bn": True, "accumulate": 2, "global_batch_size": 50, "freeze": ["1"]}
    runs = {
        size: run_in_workers(size, _fit, tmp_path / str(size), {**settings, "sync_bn": size > 1})[0]
        for size in (1, 2, 3)
    }
    for size in (2, 3):
        assert losses(tmp_path / str(size)) == pytest.approx(losses(tmp_path / "1"), abs=1e-9)
        assert runs[size]["val"] == pytest.approx(runs[1]["val"], abs=1e-9)
