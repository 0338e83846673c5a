"""A run that was interrupted after any step and resumed ends with the weights of the run that was not, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import final_weights, losses, train_digits
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records

SETTINGS = {"epochs": 2, "global_batch_size": 60, "log_every": 1, "shift": 1, "lr": 0.05}
SAMPLES, STEPS = 260, 10  # epochs of 60, 60, 60, 60 and 20 samples


def _train(size: int, path: Path, **settings: object) -> None:
    run_in_workers(size, train_digits, "lively", SAMPLES, 50, {**SETTINGS, "run_dir": path, **settings})


@pytest.mark.parametrize(("size", "stops"), [(1, (3, 5)), (2, range(1, STEPS)), (3, (1, 4, 5, 8))])
def test_interrupted_and_resumed_is_bit_identical(tmp_path: Path, size: int, stops: range) -> None:
    whole = tmp_path / "whole"
    _train(size, whole)
    for stop in stops:
        path = tmp_path / f"stopped-{stop}"
        _train(size, path, max_steps=stop)
        _train(size, path, resume="auto")
        assert final_weights(path) == final_weights(whole), f"stopped after step {stop}"
        assert losses(path) == losses(whole), f"stopped after step {stop}"


@pytest.mark.parametrize(
    "extra",
    [
        {"ema_decay": 0.9, "optimizer": "adamw", "lr": 1e-3},
        {"accumulate": 2, "clip_norm": 0.1, "precision": "bf16"},
        {"schedule": "onecycle", "momentum": 0.0, "decay_all": False, "channels_last": True},
    ],
)
def test_every_kind_of_state_is_resumed(tmp_path: Path, extra: dict[str, object]) -> None:
    _train(3, tmp_path / "whole", **extra)
    _train(3, tmp_path / "stopped", max_steps=7, **extra)
    _train(3, tmp_path / "stopped", resume="auto", **extra)
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "whole")
    average = [
        max((tmp_path / run / "checkpoints").glob("step-*")) / "average.safetensors" for run in ("whole", "stopped")
    ]
    assert [path.exists() for path in average] == ["ema_decay" in extra] * 2
    if "ema_decay" in extra:
        assert average[0].read_bytes() == average[1].read_bytes()


def test_momentum_of_channels_last_weights_keeps_its_layout(tmp_path: Path) -> None:
    settings = {**SETTINGS, "channels_last": True}
    for path, extra in (("whole", {}), ("stopped", {"max_steps": 7}), ("stopped", {"resume": "auto"})):
        run_in_workers(2, train_digits, "deep", SAMPLES, 50, {**settings, **extra, "run_dir": tmp_path / path})
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "whole")


def test_records_have_each_step_once_after_a_crash_and_a_resume(tmp_path: Path) -> None:
    _train(2, tmp_path, checkpoint_epochs=0, checkpoint_steps=3, max_steps=8)
    (newest,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.name == "step-00000008")
    newest.rename(tmp_path / "lost")  # as if the run had died before this checkpoint was written
    _train(2, tmp_path, resume="auto", checkpoint_steps=3)
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, STEPS + 1))
    epochs = [(record["epoch"], record["split"]) for record in records if record["kind"] == "epoch"]
    assert epochs == [(1, "train"), (1, "val"), (2, "train"), (2, "val")]
    whole_epoch = [record["samples"] for record in records if record["kind"] == "epoch" and record["split"] == "train"]
    assert whole_epoch == [SAMPLES, SAMPLES]


def test_another_number_of_workers_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    _train(1, tmp_path / "whole", precision="fp64")
    settings = {"net": "plain"}
    for path, sizes in ((tmp_path / "alone", (1, 1)), (tmp_path / "grown", (2, 3))):
        for size, extra in zip(sizes, ({"max_steps": 4}, {"resume": "auto"}), strict=True):
            job = {**SETTINGS, "run_dir": path, "precision": "fp64", **extra}
            run_in_workers(size, train_digits, settings["net"], SAMPLES, 50, job)
    assert losses(tmp_path / "grown") == pytest.approx(losses(tmp_path / "alone"), abs=1e-9, rel=0)
    assert len(losses(tmp_path / "grown")) == STEPS
