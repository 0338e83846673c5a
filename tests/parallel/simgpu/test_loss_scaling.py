"""The loss scale on a simulated GPU, which decides alone whether to skip a step: its course is that of the host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
import torch.distributed as dist
from runs import losses, train_digits
from safetensors.torch import load_file
from simulated_gpu import on_gpus, run_on_gpu, run_on_gpus
from torch import nn

from lockstep.errors import NonFiniteLossError
from lockstep.files.jsonl import read_records
from lockstep.train import precision, setup
from lockstep.train.optim.build import takes_found_inf
from lockstep.train.precision import FIRST, DeviceLossScaler, LossScaler, ScaledPrecision
from lockstep.train.strategies import Strategy
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect

pytestmark = pytest.mark.usefixtures("simulated_gpu")

STEPS = 24
COMMON: dict[str, Any] = {"epochs": 3, "global_batch_size": 48, "max_steps": STEPS}
GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes
EVERY = (1, 5)
"""Steps between two reports, which read the outcome of the last step earlier."""


def _overflow_at_first_and_later() -> None:
    """Choose scales with which a step overflows now and then, for the rest of this process."""
    precision.FIRST, LossScaler.interval = 2.0**24, 3


def _train(folder: Path, device: torch.device, settings: dict[str, Any]) -> None:
    _overflow_at_first_and_later()
    train_digits(World(RankInfo(), device), "normed", 480, 48, {**COMMON, **settings, "run_dir": folder})


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        f"{file.name} {name}": tensor
        for file in newest.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def _train_on_both(folder: Path, settings: dict[str, Any]) -> None:
    for every in EVERY:
        _train(folder / f"host-{every}", torch.device("cpu"), {**settings, "log_every": every})
        _train(folder / f"gpu-{every}", GPU, {**settings, "log_every": every})


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "O1", "accumulate": 2},
        {"precision": "O2", "ema_decay": 0.9, "clip_norm": 1.0},
        {"precision": "O2", "optimizer": "lamb", "lr": 0.01},
        {"precision": "O3", "loss_scale": "dynamic"},
        pytest.param({"precision": "O1", "optimizer": "lars", "lr": 5.0, "ema_decay": 0.9}, marks=pytest.mark.long),
        pytest.param({"precision": "O2", "optimizer": "adamw", "lr": 0.003, "ema_decay": 0.9}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gpu_skips_the_steps_that_the_host_skips(tmp_path: Path, settings: dict[str, Any]) -> None:
    run_on_gpu(_train_on_both, tmp_path, {"lr": 0.05, "schedule": "cosine", **settings})
    for every in EVERY:
        found, expected = _steps(tmp_path / f"gpu-{every}"), _steps(tmp_path / f"host-{every}")
        _compare_courses(found, expected, steps=STEPS)
        assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.02)
        ours, theirs = _tensors(tmp_path / f"gpu-{every}"), _tensors(tmp_path / f"host-{every}")
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=0.05, atol=0.01, msg=name)
            if "n_averaged" in name or "step" in name:
                assert torch.equal(tensor, theirs[name]), name


def _compare_courses(found: list[dict[str, Any]], expected: list[dict[str, Any]], steps: int) -> None:
    for key in ("step", "lr", "loss_scale", "skipped_steps"):
        assert [record[key] for record in found] == [record[key] for record in expected], key
    # Steps are skipped at first, and later again.
    assert 0 < found[0]["skipped_steps"] < found[-1]["skipped_steps"] < steps // 2


def _train_in_parts(folder: Path, optimizer: str) -> None:
    settings = {"precision": "O2", "optimizer": optimizer, "lr": 0.01, "ema_decay": 0.9}
    _train(folder / "whole", GPU, {**settings, "log_every": 1})
    for steps in (1, 7, 12, STEPS):
        resume = "auto" if steps > 1 else None
        _train(folder / "parts", GPU, {**settings, "log_every": 4, "max_steps": steps, "resume": resume})


@pytest.mark.parametrize(
    "optimizer", ["sgd", "lamb", *(pytest.param(name, marks=pytest.mark.long) for name in ("adamw", "lars"))]
)
def test_resume_on_a_gpu_is_exact(tmp_path: Path, optimizer: str) -> None:
    run_on_gpu(_train_in_parts, tmp_path, optimizer)
    ours, theirs = _tensors(tmp_path / "parts"), _tensors(tmp_path / "whole")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert _steps(tmp_path / "whole")[-1]["skipped_steps"] > 1


def _overflow_always(folder: Path) -> str:
    with pytest.raises(NonFiniteLossError) as error:
        _train(folder, GPU, {"precision": "O1", "loss_scale": 2.0**60, "max_steps": 30, "log_every": 10})
    return str(error.value)


def test_overflows_at_every_scale_end_training(tmp_path: Path) -> None:
    assert "in 26 steps in a row up to step 26, now at loss scale 1.15292e" in run_on_gpu(_overflow_always, tmp_path)


def _train_with_remembered_gradients(folder: Path) -> list[str]:
    events: list[str] = []

    class Remembering(Strategy):
        remembers_gradients = True  # as with PowerSGD, which adds a step's errors to the next one's gradients

        def finish_gradients(self) -> None:
            events.append("gradients")

        def forget_gradients(self) -> None:
            events.append("forget")

        def rescale(self, factor: float) -> None:
            events.append(f"rescale {factor}")

    setup.build_strategy = lambda *_: Remembering()
    _train(folder, GPU, {"precision": "O1", "max_steps": 12, "lr": 0.05})
    return events


def test_strategy_forgets_gradients_that_overflowed_at_once(tmp_path: Path) -> None:
    events = run_on_gpu(_train_with_remembered_gradients, tmp_path)
    assert events[:2] == ["gradients", "forget"]
    last = max(index for index, event in enumerate(events) if event == "forget")
    assert events[last - 1] == "gradients"
    assert "rescale 2.0" in events


@on_gpus()
def test_host_skips_optimizers_that_the_gpu_cannot_skip() -> None:
    precision = ScaledPrecision(GPU.type, "dynamic")
    weight = nn.Parameter(torch.ones(2, device=GPU))
    optimizer = torch.optim.RMSprop([weight], lr=0.1)
    assert not takes_found_inf(optimizer)
    steps = []
    for factor in (float("inf"), 1.0):
        precision.backward(weight.sum() * factor)
        precision.unscale(optimizer)
        taken = bool(precision.step(optimizer))
        steps.append((taken, precision.outcome(optimizer), bool((weight == 1).all()), precision.loss_scale))
        optimizer.zero_grad()
    scale = FIRST / 2
    assert steps == [(False, None, True, scale), (True, None, False, scale)]


@on_gpus()
def test_scale_changes_as_on_the_host() -> None:
    _overflow_at_first_and_later()
    ours, theirs = DeviceLossScaler("dynamic"), LossScaler("dynamic")
    simgpu.delays(copy_us=20_000)  # what is read before its copy is that of an earlier step, if anything
    skipped = 0
    for number in range(30):
        ours.scaled(torch.ones((), device=GPU))
        for scaler, device in ((theirs, "cpu"), (ours, GPU)):
            gradient = torch.full((2,), float("nan") if number % 11 == 4 else 1.0, device=device)
            scaler.unscale_([gradient, torch.full((1,), 1.0, device=device).half()])
        taken = theirs.update()
        ours.update()
        assert ours.outcome() is taken
        assert ours.state_dict() == theirs.state_dict()
        assert ours.outcome() is None
        skipped += not taken
        if number == 20:
            ours.load_state_dict({"scale": 2.0**23, "good_steps": 1})
            theirs.load_state_dict({"scale": 2.0**23, "good_steps": 1})
    assert skipped == 3


WAYS: list[dict[str, Any]] = [
    {"optimizer": "lamb", "shard_optimizer": True},
    {"compress": "powersgd", "max_steps": 11},  # in step 12, rounding decides whether a gradient overflows
]
TOGETHER = {"precision": "O1", "schedule": "cosine", "lr": 0.01, "log_every": 3, "epochs": 4, "max_steps": 16}


def _train_together(_: World, folder: Path, settings: dict[str, Any]) -> None:
    _overflow_at_first_and_later()
    simgpu.delays(seed=1, collective_us=2000)
    dist.destroy_process_group()
    for device in ("cpu", "gpu"):
        with connect(RankInfo.from_environment(), device) as world:
            train_digits(world, "normed", 96, 24, {**settings, "run_dir": folder / device})


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_gpus_skip_the_steps_that_hosts_skip(tmp_path: Path, way: dict[str, Any]) -> None:
    run_on_gpus(2, _train_together, tmp_path, {**TOGETHER, "global_batch_size": 24, **way})
    _compare_courses(_steps(tmp_path / "gpu"), _steps(tmp_path / "cpu"), steps=32)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), abs=1e-3)
