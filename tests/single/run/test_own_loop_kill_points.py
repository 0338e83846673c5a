"""One's own loop, killed and stopped at each place of an epoch's body, ends with the same bits as undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import StoppedError
from lockstep.files.jsonl import read_records

EPOCHS, STEPS, BATCH = 3, 4, 4
generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(
    torch.randn(BATCH * STEPS, 3, generator=generator), torch.randn(BATCH * STEPS, generator=generator)
)


class Killed(Exception):
    """Raised at a place of the loop; what was being written is written."""


At = Callable[[str], None]
Body = Callable[["Program", At], None]


class Program:
    def __init__(self, folder: Path, **options: Any):
        self.world = lockstep.connect("cpu")
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.train = self.world.loader(DATA, BATCH, shuffle=True)
        states = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.run = self.world.run(folder, loader=self.train, log_every=1, **states, **options)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(inputs)[:, 0], targets)

    def count(self, name: str) -> None:
        self.run.extra[name] = self.run.extra.get(name, 0) + 1


PLACES = (
    *("before the inner loop", "in a step", "after a step", "after a save between steps", "after the last step"),
    *("after a save", "after the scheduler", "after the record", "after the best save", "at the end"),
)


def evaluating(own: Program, at: At) -> None:
    """Save where users do: between two steps, directly after the last one, and as the best one after an evaluation."""
    for epoch in own.run.epochs(EPOCHS):
        at("before the inner loop")
        for number, batch in enumerate(own.train, own.train.steps_done):
            loss = own.loss(*batch)
            own.optimizer.zero_grad()
            own.run.backward(loss)
            at("in a step")
            own.optimizer.step()
            own.run.step(loss=loss)
            own.count("steps")
            at("after a step")
            if number == 1:
                own.run.save(best=True)
                at("after a save between steps")
        at("after the last step")
        own.run.save()
        at("after a save")
        own.scheduler.step()
        own.count("epochs")
        at("after the scheduler")
        own.run.record(top1=epoch / EPOCHS)
        at("after the record")
        own.run.save(best=epoch < 2)
        at("after the best save")
        own.count("ends")
        at("at the end")


def _play(body: Body, folder: Path, end: tuple[str, int] | None = None, stops: bool = False, **options: Any) -> Any:
    """Run a program, which ends when it comes to a place for the given time; return what it has in the end."""
    times = 0

    def at(place: str) -> None:
        nonlocal times
        times += end is not None and place == end[0]
        if end == (place, times):
            times += 1
            if not stops:
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)

    program = None
    try:
        program = Program(folder, **options)
        body(program, at)
        return program.net.state_dict(), program.optimizer.state_dict(), program.run.extra
    finally:
        if program is not None:
            program.world.close()


def _left(folder: Path) -> Any:
    """Return the records, and the models of the best and the newest checkpoint."""
    kinds, checkpoints = ("step", "epoch"), folder / "checkpoints"
    records = [each for each in read_records(folder / "metrics.jsonl") if each["kind"] in kinds]
    kept = [(each["kind"], each["step"], each.get("loss"), each.get("top1"), each.get("lr")) for each in records]
    newest = max(checkpoints.glob("step-*"))
    states = [path.read_bytes() for path in sorted(newest.glob("*.safetensors"))]
    best = checkpoints / "best"
    return kept, newest.name, states, best.exists() and (best.resolve().name, (best / "model.safetensors").read_bytes())


def _check(body: Body, folder: Path, end: tuple[str, int], **options: Any) -> None:
    """Kill the program, stop it at the same place after it was resumed, and resume it again."""
    expected = _play(body, folder / "undisturbed", **options)
    with pytest.raises(Killed):
        _play(body, folder / "disturbed", end, **options)
    with suppress(StoppedError):  # at the last place, the program may end first
        _play(body, folder / "disturbed", end, stops=True, **options)
    found = _play(body, folder / "disturbed", **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert _left(folder / "disturbed") == _left(folder / "undisturbed")


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint_steps": 1}, {"checkpoint_steps": 3, "checkpoint_epochs": 0}, {"checkpoint_epochs": 2}],
    ids=str,
)
@pytest.mark.parametrize("place", PLACES)
def test_each_place_of_the_body_is_passed_once(place: str, options: dict[str, Any], tmp_path: Path) -> None:
    each_epoch = STEPS if place in ("in a step", "after a step") else 1
    _check(evaluating, tmp_path, (place, 1 + each_epoch), **options)


def by_hand(zero: str) -> Body:
    """Accumulate three batches a step, so that epochs end within one; `zero`: where gradients are set to zero."""

    def body(own: Program, at: At) -> None:
        number = own.run.extra.setdefault("batches", 0)
        for _ in own.run.epochs(EPOCHS):
            for batch in own.train:
                number = own.run.extra["batches"]
                if zero == "before" and number % 3 == 0:
                    own.optimizer.zero_grad(set_to_none=False)
                own.run.extra["batches"] += 1
                (own.loss(*batch) / 3).backward()
                at("in a step")
                if number % 3 == 2:
                    own.optimizer.step()
                    if zero != "before":
                        own.optimizer.zero_grad(set_to_none=zero == "none")
                    own.run.step()
                at("after a batch")

    return body


@pytest.mark.parametrize("zero", ["none", "zeros", "before"])
@pytest.mark.parametrize("batch", range(1, 10))
def test_gradients_of_batches_before_a_stop_are_used(zero: str, batch: int, tmp_path: Path) -> None:
    _check(by_hand(zero), tmp_path, ("after a batch", batch), checkpoint_steps=1)


def test_a_save_is_written_if_the_body_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def early(own: Program, at: At) -> None:
        for _ in own.run.epochs(EPOCHS):
            for batch in own.train:
                own.run.backward(own.loss(*batch))
                own.optimizer.step()
                own.run.step()
            own.run.save(best=True)
            break
        at("after the loop")
        own.run.close()

    with pytest.raises(Killed):
        _play(early, tmp_path, ("after the loop", 1))
    assert "run.save: not written, since its epoch was left: call run.close()" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints/best").exists()
    _play(early, tmp_path)
    assert (tmp_path / "checkpoints/best").resolve().name == "step-00000004"
