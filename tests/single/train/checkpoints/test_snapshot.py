"""Checkpoints of a device whose copies to the host come late, on a CPU that stands in for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.data.sources import digits
from lockstep.seeding import seed_all
from lockstep.train.checkpoints.snapshot import HostCopies
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world import accelerator
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

STEPS = 6


class Late:
    """A side stream, the training stream and their events: copies are made when something waits for them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        late, memory = self, torch.empty(tensor.shape, dtype=tensor.dtype)

        class Pinned(torch.Tensor):
            def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
                assert non_blocking
                late.log.append("copy")
                late.copies.append((memory, source))
                return memory

        return memory.as_subclass(Pinned)

    def make(self) -> None:
        for memory, source in self.copies:
            memory.copy_(source)
        self.copies.clear()


class Event:
    def __init__(self, late: Late) -> None:
        self.late, self.done = late, threading.Event()

    def synchronize(self) -> None:
        if not self.done.wait(0.5):  # as late as possible: after the steps that may change what is copied
            self.late.make()

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    def __init__(self, late: Late, name: str) -> None:
        self.late, self.name = late, name

    def wait_stream(self, other: Stream) -> None:
        self.late.log.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: Event) -> None:
        self.late.log.append(f"{self.name} records")

    def wait_event(self, event: Event) -> None:
        self.late.log.append(f"{self.name} waits for the event")
        self.late.make()
        event.done.set()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    found = Late()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.log.append(f"on {stream.name}")
        yield
        found.log.append(f"off {stream.name}")

    monkeypatch.setattr(accelerator, "overlaps", lambda device: True)
    monkeypatch.setattr(accelerator, "use", lambda device: None)
    monkeypatch.setattr(accelerator, "on", on)
    monkeypatch.setattr(accelerator, "new_stream", lambda device, urgent=False: Stream(found, "side"))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: Stream(found, "training"))
    monkeypatch.setattr(accelerator, "new_event", lambda device, timing=False: Event(found))
    monkeypatch.setattr(accelerator, "pinned_like", found.pinned_like)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return found


def test_copies_are_made_between_the_work_before_and_the_change_after(late: Late) -> None:
    copies = HostCopies(torch.device("cpu"))
    weight = torch.ones(2)
    with copies.making() as wait:
        state = copies.copy({"weights": [weight], "step": 3})
    copies.protect()
    copies.protect()
    weight.zero_()
    wait()
    assert late.log == [
        "side waits for training",
        "on side",
        "copy",
        "off side",
        "side records",
        "training waits for the event",
    ]
    assert state["step"] == 3
    assert torch.equal(state["weights"][0], torch.ones(2))


def test_without_streams_a_state_is_copied_at_once() -> None:
    copies = HostCopies(torch.device("cpu"))
    weight = torch.arange(6.0).view(2, 3).t()
    buffers = copies.steady({"count": weight})
    assert buffers["count"] is weight
    with copies.making() as wait:
        state = copies.copy((weight,))
    weight.zero_()
    wait()
    assert state[0].is_contiguous()
    assert state[0].tolist() == [[0, 3], [1, 4], [2, 5]]


def _train(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoints after each second step."""
    settings: dict[str, Any] = {"epochs": 1, "global_batch_size": 48, "max_steps": STEPS, "checkpoint_steps": 2}
    config = configure(**settings, run_dir=path, keep=STEPS, track=(), optimizer="lamb", ema_decay=0.5)
    seed_all(0, 0, 0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    run_with(config, World(RankInfo(), torch.device("cpu")), digits.load(), net)
    files = sorted((path / "checkpoints").glob("step-*/*.safetensors"))
    return {
        f"{file.parent.name} {file.name} {name}": value for file in files for name, value in load_file(file).items()
    }


def test_a_checkpoint_holds_its_steps_state_although_copies_come_late(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = _train(tmp_path / "at-once")
    late: Late = request.getfixturevalue("late")
    found = _train(tmp_path / "late")
    assert late.log.count("training waits for the event") == STEPS // 2 - 1  # none follows the last
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def test_a_state_is_pinned_only_up_to_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch, late: Late) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * 2 * 1024))
    copies = HostCopies(torch.device("cpu"), workers=2)  # 1 KiB for each
    state = [torch.full((100,), float(number)) for number in range(4)]  # 400 bytes, for which torch pins 512
    with copies.making():
        made = copies.copy(state)
    assert len(late.copies) == 2
    late.make()
    assert [tensor[0].item() for tensor in made] == [0, 1, 2, 3]
