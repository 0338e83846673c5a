"""Precision levels in whole runs: with every strategy, over a resume, and when gradients overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import losses, train_digits, weights_of
from safetensors.torch import load_file
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records

COMMON: dict[str, Any] = {"epochs": 2, "max_steps": 6, "global_batch_size": 24, "log_every": 1, "lr": 0.1}


def _train(path: Path, size: int = 1, net: str = "plain", **settings: Any) -> list[float]:
    run_in_workers(size, train_digits, net, 96, 24, {**COMMON, "run_dir": path, **settings})
    return losses(path)


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_every_strategy_trains_alike_at_every_level(tmp_path: Path, precision: str) -> None:
    settings = {"precision": precision, "loss_scale": 512.0, "accumulate": 2, "clip_norm": 1.0}
    exact = _train(tmp_path / "exact", precision="fp64", accumulate=2, clip_norm=1.0)
    ways: dict[str, dict[str, Any]] = {
        "single": {"size": 1},
        "ddp": {"size": 2},
        "horovod": {"size": 2, "strategy": "horovod"},
        "sharded": {"size": 2, "strategy": "ddp", "shard_optimizer": True},
    }
    for name, way in ways.items():
        assert _train(tmp_path / name, **way, **settings) == pytest.approx(exact, abs=2e-2), name


def _steps(path: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(path / "metrics.jsonl") if record["kind"] == "step"]


@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "ddp"), (2, "horovod")])
def test_skipped_step_is_reported_and_keeps_the_schedule(
    tmp_path: Path, size: int, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    _train(path, size, precision="O2", loss_scale=2.0**40, strategy=strategy, schedule="cosine")
    assert "gradient overflow at step 1, step skipped, loss scale stays 1.09951e+12" in capfd.readouterr().out
    rows = _steps(path)
    assert [row["skipped_steps"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["lr"] for row in rows} == {0.1}  # cosine would have lowered it
    assert len({row["loss"] for row in rows[:1] + rows[4:5]}) == 2  # other batches, but the weights stayed
    _train(tmp_path / "untouched", size, precision="O2", lr=1e-30)
    for name, weight in weights_of(path).items():
        assert weight.equal(weights_of(tmp_path / "untouched")[name])


def test_a_gradient_that_no_scale_helps_stops_all_workers(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="NonFiniteLossError: the gradient was NaN or infinite in 26 steps"):
        _train(tmp_path / "run", 2, precision="O1", loss_scale=2.0**60, max_steps=60, epochs=20)


def test_the_loss_scale_goes_over_a_resume_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "O2", "net": "normed", "ema_decay": 0.9}
    _train(tmp_path / "whole", 2, **settings)
    _train(tmp_path / "parts", 2, **settings, max_steps=3)
    _train(tmp_path / "parts", 2, **settings, resume="auto")
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(weight.equal(parts[name]) for name, weight in whole.items())
    for row, other in zip(_steps(tmp_path / "whole")[3:], _steps(tmp_path / "parts")[3:], strict=True):
        assert row["loss_scale"] == other["loss_scale"]
    states = [max((tmp_path / x / "checkpoints").glob("step-*")) / "states.safetensors" for x in ("whole", "parts")]
    first, second = map(load_file, states)
    assert "average.n_averaged" in first
    assert all(tensor.equal(second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("first", "then"), [("O2", "fp32"), ("fp32", "O2"), ("O3", "O1")])
def test_a_run_can_go_on_at_another_level(tmp_path: Path, first: str, then: str) -> None:
    path = tmp_path / "run"
    _train(path, 1, precision=first, max_steps=3)
    course = _train(path, 2, precision=then, resume="auto")
    exact = _train(tmp_path / "exact", precision="fp64")
    assert course == pytest.approx(exact, abs=3e-2)
