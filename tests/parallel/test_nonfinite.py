"""NaN on one worker: stopped or skipped, with its worker, step and layer named."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from bad_samples import BAD, figures, log, train
from runs import all_finite
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train import setup
from lockstep.train.guards.nonfinite import DeferredWatch
from lockstep.world.world import World


def _run(path: Path, value: float = float("nan"), **settings: Any) -> str:
    outcomes = run_in_workers(2, train, path, value, settings)
    assert len(set(outcomes)) == 1
    return outcomes[0]


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path / "metrics.jsonl") if record["kind"] == "step"]


def test_the_worker_the_step_and_the_cause_are_named(tmp_path: Path) -> None:
    said = _run(tmp_path / "input")
    assert f"found it first in the input, sample {BAD} of the training set" in said
    layer = _run(tmp_path / "layer", value=9.0)
    assert "found it first in the output of layer 0 (Touchy)" in layer
    for text in (said, layer):
        assert text.startswith("the loss is nan at step 4 (epoch 1, current learning rate 0.0396946): worker 1 on "), (
            text
        )
        assert "worker 0 on" not in text
        assert "last good checkpoint" in text
        assert "Lower --lr, lengthen --warmup-epochs or add --clip-norm 1" in text


def test_skipped_steps_are_counted_in_the_records(tmp_path: Path) -> None:
    assert _run(tmp_path, on_nan="skip", checkpoint_steps=2, clip_norm=1.0, track=("tensorboard",)) == ""
    assert f"worker 1 on {socket.gethostname()} found it first in the input, sample {BAD}" in log(tmp_path)
    assert _steps(tmp_path) == [2, 4, 5, 6, 8, 10]
    assert [skipped for _, _, skipped in figures(tmp_path)] == [0, 1, 1, 2, 2, 2]
    assert all_finite(tmp_path)


def test_skip_stops_when_an_update_made_weights_infinite(tmp_path: Path) -> None:
    """The update of step 3 does it; step 4's gradient shows it."""
    said = run_in_workers(2, _spoil, tmp_path, {"checkpoint_steps": 2, "on_nan": "skip", "max_steps": 5})
    # The newest checkpoint's name comes last: rank 0 may be writing one while another worker looks.
    assert said[0].partition(" The last good")[0] == said[1].partition(" The last good")[0]
    assert "found it first in the weight 1.0.weight" in said[0]
    assert "Skipping steps cannot repair weights. The last good checkpoint: " in said[0]


def test_infinite_weights_stop_a_run_in_fp16(tmp_path: Path) -> None:
    said = run_in_workers(2, _spoil, tmp_path, {"checkpoint_steps": 2, "max_steps": 5, "precision": "O1"})
    assert all("the weights are NaN or infinite before step 4. The last good checkpoint: " in each for each in said)


def _spoil(world: World, path: Path, settings: dict[str, Any]) -> str:
    """Training whose optimizer sets a weight to infinity in step 3."""
    kept = torch.optim.SGD.step
    seed_all(0, 3, world.rank)  # as the step is
    its_seed = torch.initial_seed()

    def step(self: Any, closure: Any = None) -> Any:
        kept(self)
        if torch.initial_seed() == its_seed:
            self.param_groups[0]["params"][0].data[0] = float("inf")

    torch.optim.SGD.step = step  # type: ignore[method-assign]  # in this forked process alone
    return train(world, path, 0.0, settings)


def test_late_report_still_names_step_and_worker(tmp_path: Path) -> None:
    outcomes = run_in_workers(2, _train_as_on_a_gpu, tmp_path)
    assert outcomes[0] == outcomes[1]
    assert "the gradient is NaN or infinite at step 6 (epoch 2, " in outcomes[0]
    assert "; so is the loss on worker 1. The last good checkpoint: " in outcomes[0]


def _train_as_on_a_gpu(world: World, path: Path) -> str:
    setup.build_guard = lambda *_: DeferredWatch()  # in this forked process alone
    return train(world, path, float("nan"), {"log_every": 20, "start_epoch": 1})
