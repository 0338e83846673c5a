"""`fit` on tokens, masks and numbers: the same training for any number of workers, strategy and interruption."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_samples import log
from fit_programs import PROGRAMS, RATES
from runs import all_finite, losses
from torch.utils.data import default_collate
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.train import Result
from lockstep.world.world import World


def _train(world: World, name: str, path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    result: Result = PROGRAMS[name](world, path, **settings)
    assert math.isnan(result.top1)
    assert result.confusion_matrix is None
    figures = {
        **result.metrics,
        "loss": result.loss,
        "samples": result.samples,
        "val": result.history.val["loss"].tolist(),
    }
    assert "top1" not in result.history.val
    return figures


def _figures(size: int, name: str, path: Path, **settings: Any) -> dict[str, Any]:
    rate = {} if callable(settings.get("optimizer")) else {"lr": RATES[name]}
    results = run_in_workers(size, _train, name, path, {**rate, **settings})
    assert all(result == results[0] for result in results)
    return results[0]


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(ours[name] == pytest.approx(theirs[name], abs=1e-9, rel=0) for name in theirs)


def _pairs(options: dict[str, dict[str, Any]]) -> list[Any]:
    """Return each program with each of the options; the short form has each program, and each of the options, once."""
    short = range(max(len(PROGRAMS), len(options)))
    taken = {(number % len(PROGRAMS), number % len(options)) for number in short}
    return [
        pytest.param(name, settings, id=f"{option}-{name}", marks=[] if at in taken else [pytest.mark.long])
        for first, name in enumerate(PROGRAMS)
        for second, (option, settings) in enumerate(options.items())
        for at in [(first, second)]
    ]


# 45 samples, so that the last step has 5 or 1.
BATCHES: dict[str, dict[str, Any]] = {
    "accumulated": {"global_batch_size": 10, "accumulate": 3},
    "a worker without samples": {"global_batch_size": 22, "collate_fn": default_collate},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "horovod": {"strategy": "horovod"},
    "sharded": {"strategy": "ddp", "shard_optimizer": True, "optimizer": "adamw", "lr": 0.02},
    "O2": {"precision": "O2", "ema_decay": 0.5, "loader_workers": 1},
    "own optimizer": {"precision": "bf16", "optimizer": partial(torch.optim.AdamW, lr=0.02)},
}


@pytest.mark.parametrize(("name", "settings"), _pairs(BATCHES))
def test_1_2_and_3_workers_train_the_same(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    runs = {size: _figures(size, name, tmp_path / str(size), **settings) for size in (1, 2, 3)}
    course = losses(tmp_path / "1")
    assert course[-2] < 0.95 * course[0]
    for size in (2, 3):
        assert losses(tmp_path / str(size)) == pytest.approx(course, abs=1e-9, rel=0)
        assert _equal(runs[size], runs[1])


@pytest.mark.parametrize(("name", "settings"), _pairs(OPTIONS))
def test_options_of_training_take_any_items(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    _figures(2, name, tmp_path, epochs=2, **settings)
    course = losses(tmp_path)
    assert min(course[-3:]) < course[0]


def test_best_checkpoint_has_the_lowest_validation_loss(tmp_path: Path) -> None:
    figures = _figures(2, "line", tmp_path, epochs=4, lr=0.6, momentum=0.0, schedule="constant", keep=9)
    lowest = min(range(4), key=figures["val"].__getitem__)
    assert (tmp_path / "checkpoints" / "best").resolve().name == f"step-{5 * (lowest + 1):08d}"
    kinds = {
        record["kind"] for record in read_records(tmp_path / "metrics.jsonl") if "top1" in record or "top5" in record
    }
    assert not kinds


def test_step_with_a_bad_sample_is_skipped_and_named(tmp_path: Path) -> None:
    _figures(2, "segmenter", tmp_path, bad=7, on_nan="skip", epochs=1)
    assert "found it first in the input, sample 7 of the training set; step skipped" in log(tmp_path)
    steps = [record for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "step"]
    assert steps[-1]["skipped_steps"] == 1
    assert all_finite(tmp_path)
