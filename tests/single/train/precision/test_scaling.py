"""Loss scaling that leaves its decisions to the device, on a CPU that stands in for one: it takes the host's course."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.data.sources import digits
from lockstep.errors import NonFiniteLossError
from lockstep.files.jsonl import read_records
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.optim.build import takes_found_inf
from lockstep.train.precision import scaling
from lockstep.train.precision.scaling import DeviceLossScaler, LossScaler, ScaledPrecision
from lockstep.train.run import run_with
from lockstep.train.strategies import Strategy
from lockstep.world import accelerator
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

STEPS = 24
COMMON: dict[str, Any] = {"epochs": 2, "global_batch_size": 48, "track": (), "lr_scaling": "none"}


class NoStream:
    """A CPU's stream and event: all is done when it is asked for."""

    def record_event(self, event: NoStream) -> None:
        pass

    def wait_event(self, event: NoStream) -> None:
        pass

    def wait_stream(self, stream: NoStream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: NoStream) -> float:
        return 0.0


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "overlaps", lambda device: True)
    monkeypatch.setattr(accelerator, "use", lambda device: None)
    monkeypatch.setattr(accelerator, "on", lambda stream: nullcontext())
    monkeypatch.setattr(accelerator, "pinned_like", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    monkeypatch.setattr(accelerator, "new_stream", lambda device, urgent=False: NoStream())
    monkeypatch.setattr(accelerator, "new_event", lambda device, timing=False: NoStream())
    monkeypatch.setattr(accelerator, "current_stream", lambda device: NoStream())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


@pytest.fixture(autouse=True)
def overflows_at_first_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "FIRST", 2.0**24)
    monkeypatch.setattr(scaling, "INTERVAL", 3)


def _train(path: Path, **settings: Any) -> list[dict[str, Any]]:
    """The records of the steps."""
    config = configure(**{**COMMON, "run_dir": path, "max_steps": STEPS, **settings})
    seed_all(0, 0, 0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    run_with(config, World(RankInfo(), torch.device("cpu")), digits.load(), net)
    return [record for record in read_records(path / "metrics.jsonl") if record["kind"] == "step"]


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    newest = max((path / "checkpoints").glob("step-*"))
    return {
        file.name + name: tensor for file in newest.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("log_every", [1, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "O1", "accumulate": 2},
        {"precision": "O2", "ema_decay": 0.9, "clip_norm": 1.0},
        {"precision": "O2", "optimizer": "adamw", "lr": 0.003, "ema_decay": 0.9},
        {"precision": "O1", "optimizer": "lars", "lr": 5.0, "ema_decay": 0.9},
        {"precision": "O2", "optimizer": "lamb", "lr": 0.01},
        {"precision": "O3", "loss_scale": "dynamic"},
    ],
    ids=str,
)
def test_the_device_takes_the_hosts_course(
    tmp_path: Path, settings: dict[str, Any], log_every: int, request: pytest.FixtureRequest
) -> None:
    settings = {"lr": 0.05, "schedule": "cosine", "log_every": log_every, **settings}
    expected = _train(tmp_path / "host", **settings)
    request.getfixturevalue("as_device")
    found = _train(tmp_path / "device", **settings)
    for key in ("step", "lr", "loss_scale", "skipped_steps"):
        assert [record[key] for record in found] == [record[key] for record in expected], key
    assert 0 < found[0]["skipped_steps"] < found[-1]["skipped_steps"] < STEPS // 2  # at first, and later once more
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=0.02)
    ours, theirs = _tensors(tmp_path / "device"), _tensors(tmp_path / "host")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=0.05, atol=0.01, msg=name)
        if "n_averaged" in name or "step" in name:
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb"])
def test_a_resume_on_the_device_is_exact(tmp_path: Path, optimizer: str) -> None:
    settings: dict[str, Any] = {"precision": "O2", "optimizer": optimizer, "lr": 0.01, "ema_decay": 0.9}
    whole = _train(tmp_path / "whole", **settings, log_every=1)
    for steps in (1, 7, 12, STEPS):
        _train(tmp_path / "parts", **settings, log_every=4, max_steps=steps, resume="auto" if steps > 1 else None)
    ours, theirs = _tensors(tmp_path / "parts"), _tensors(tmp_path / "whole")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert whole[-1]["skipped_steps"] > 1


@pytest.mark.usefixtures("as_device")
def test_overflows_that_no_scale_helps_end_training_on_the_device_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError, match=r"in 26 steps in a row up to step 26, now at loss scale 1\.15292e"):
        _train(tmp_path, precision="O1", loss_scale=2.0**60, max_steps=60, log_every=50)


@pytest.mark.usefixtures("as_device")
def test_a_strategy_that_remembers_gradients_learns_of_an_overflow_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Told(Strategy):
        remembers_gradients = True  # as with PowerSGD, which adds a step's errors to the next one's gradients

        def finish_gradients(self) -> None:
            events.append("gradients")

        def forget_gradients(self) -> None:
            events.append("forget")

        def rescale(self, factor: float) -> None:
            events.append(f"rescale {factor}")

    monkeypatch.setattr("lockstep.train.setup.build_strategy", lambda *_: Told())
    _train(tmp_path, precision="O1", max_steps=12, lr=0.05)
    assert events[:2] == ["gradients", "forget"]
    last = max(index for index, event in enumerate(events) if event == "forget")
    assert events[last - 1] == "gradients"
    assert "rescale 2.0" in events


def test_an_optimizer_that_only_the_host_can_skip_is_skipped_by_it(as_device: None) -> None:
    precision = ScaledPrecision("dynamic", "cpu")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.RMSprop([weight], lr=0.1)
    assert not takes_found_inf(optimizer)
    for loss, taken in ((weight.sum() * float("inf"), False), (weight.sum(), True)):
        precision.backward(loss)
        precision.unscale(optimizer)
        assert precision.step(optimizer) is taken
        assert precision.outcome(optimizer) is None
        assert torch.equal(weight.detach(), torch.ones(2)) is not taken
        optimizer.zero_grad()
    assert precision.loss_scale == scaling.FIRST / 2


def test_the_scales_course_is_the_hosts(as_device: None) -> None:
    ours, theirs = DeviceLossScaler("dynamic"), LossScaler("dynamic")
    for number in range(40):
        good = number % 11 != 4
        ours.scaled(torch.ones(()))
        for scaler in (theirs, ours):
            scaler.unscale_([torch.tensor([1.0, 2.0 if good else float("nan")]), torch.ones(1).half()])
        assert theirs.update() is good
        ours.update()
        assert ours.outcome() is good
        assert ours.outcome() is None
        assert ours.state_dict() == theirs.state_dict()
        if number == 20:
            ours.load_state_dict({"scale": 2.0**23, "good_steps": 1})
            theirs.load_state_dict({"scale": 2.0**23, "good_steps": 1})
