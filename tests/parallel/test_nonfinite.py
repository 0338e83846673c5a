"""NaN on one worker: stopped, left out or gone back from, with its worker, step and layer named."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from bad_samples import BAD, figures, log, train
from runs import all_finite, final_weights
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


def test_skip_and_rewind_come_to_the_same_weights_and_records(tmp_path: Path) -> None:
    common = {"checkpoint_steps": 2, "clip_norm": 1.0, "track": ("tensorboard",)}
    for policy in ("skip", "rewind"):
        assert _run(tmp_path / policy, on_nan=policy, **common) == ""
        finding = f"worker 1 on {socket.gethostname()} found it first in the input, sample {BAD}"
        assert finding in log(tmp_path / policy)
    assert final_weights(tmp_path / "rewind") == final_weights(tmp_path / "skip")
    assert _steps(tmp_path / "rewind") == _steps(tmp_path / "skip") == [2, 4, 5, 6, 8, 10]
    assert figures(tmp_path / "skip") == figures(tmp_path / "rewind")
    assert [skipped for _, _, skipped in figures(tmp_path / "skip")] == [0, 1, 1, 2, 2, 2]
    assert "rewinding from step 4 to step-00000002" in log(tmp_path / "rewind")


def test_rewind_without_a_checkpoint_names_what_is_missing(tmp_path: Path) -> None:
    said = _run(tmp_path, on_nan="rewind")
    assert "the gradient is NaN or infinite at step 4" in said
    assert "no checkpoint to go back to yet: add --checkpoint-steps N" in said


def test_what_an_update_has_spoilt_is_undone_by_rewind_alone(tmp_path: Path) -> None:
    """The update of step 3 does it; step 4's gradient shows it, and at its second turn that step 3 was to blame."""
    skip, rewind = (
        run_in_workers(2, _spoil, tmp_path / policy, {"checkpoint_steps": 2, "on_nan": policy, "max_steps": 5})
        for policy in ("skip", "rewind")
    )
    # The newest checkpoint's name comes last: rank 0 may be writing one while another worker looks.
    assert skip[0].partition(" The last good")[0] == skip[1].partition(" The last good")[0]
    assert "found it first in the weight 1.0.weight" in skip[0]
    assert "Skipping steps cannot repair weights; use --on-nan rewind. The last good checkpoint: " in skip[0]
    assert rewind == ["", ""]
    said = [
        line for line in log(tmp_path / "rewind").splitlines() if "step-00000002" in line or "; step skipped" in line
    ]
    ends = ("without the update of step 4", "without the update of step 3", "step skipped")
    assert [line.endswith(end) for line, end in zip(said, ends, strict=True)] == [True] * 3
    assert all_finite(tmp_path / "rewind")


def test_rewind_in_fp16_leaves_out_the_spoiling_update(tmp_path: Path) -> None:
    """Step 4 overflows for it, so step 3 was to blame."""
    settings = {"checkpoint_steps": 2, "on_nan": "rewind", "max_steps": 5, "precision": "O1"}
    assert run_in_workers(2, _spoil, tmp_path, settings) == ["", ""]
    said = [line for line in log(tmp_path).splitlines() if "step-00000002" in line or "; step skipped" in line]
    ends = ("without the update of step 3", "made the weights NaN or infinite; step skipped")
    assert [line.endswith(end) for line, end in zip(said, ends, strict=True)] == [True] * 2
    assert all_finite(tmp_path)


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
