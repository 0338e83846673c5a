"""Steps of several batches in one's own loop: the loss that is recorded, and divisions that are done twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.files.jsonl import read_records
from lockstep.run.accumulation import is_divided
from lockstep.run.connect import TrainingWorld
from lockstep.world.launcher_environment import RankInfo

DATA = TensorDataset(torch.randn(11, 3, generator=torch.Generator().manual_seed(0)))
Number = Any


def _recorded(folder: Path, accumulate: int, divide: Callable[[Number], Number], give: Callable[..., Number]) -> float:
    """Return the recorded loss of a step of 11 samples; `give` gets the loss and what `backward` got."""
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    torch.manual_seed(0)
    model, penalty = nn.Linear(3, 1), nn.Linear(3, 1)
    train = world.loader(DATA, global_batch=11, accumulate=accumulate)
    run = world.run(folder, loader=train, model=model, penalty=penalty, log_every=1)
    for _ in run.epochs(1):
        for (inputs,) in train:
            run.backward(100 * penalty(inputs).square().mean())  # another loss, as of a GAN
            loss = model(inputs).square().mean()
            used = divide(loss)
            run.backward(used)
            if train.completes_step:
                run.step(loss=give(loss, used))
    run.close()
    return next(each["loss"] for each in read_records(folder / "metrics.jsonl") if each["kind"] == "step")


SCALE = torch.tensor(65536.0)


@pytest.mark.parametrize(
    ("divide", "give"),
    [
        (lambda loss: loss, lambda loss, used: loss),
        (lambda loss: loss, lambda loss, used: loss.item()),
        (lambda loss: loss, lambda loss, used: loss.detach()),
        (lambda loss: loss * SCALE, lambda loss, used: loss),
        (lambda loss: loss * SCALE, lambda loss, used: loss.item()),
        (lambda loss: loss / 4, lambda loss, used: loss),
        (lambda loss: loss / 4, lambda loss, used: used * 4),
        (lambda loss: loss * 4, lambda loss, used: used / 4),
        (lambda loss: loss / loss.new_ones(1)[0], lambda loss, used: used),
    ],
)
def test_the_mean_over_a_step_is_recorded(divide: Any, give: Any, tmp_path: Path) -> None:
    whole = _recorded(tmp_path / "whole", 1, lambda loss: loss, lambda loss, used: loss)
    assert _recorded(tmp_path / "parts", 4, divide, give) == pytest.approx(whole, rel=1e-6)


def test_a_number_of_the_callers_is_recorded_as_it_is(tmp_path: Path) -> None:
    assert _recorded(tmp_path, 4, lambda loss: loss + 1, lambda loss, used: loss.detach() * 0 + 7) == 7


def test_losses_that_an_optimizer_has_used_do_not_count(tmp_path: Path) -> None:
    """A critic takes several steps of its own before `run.step`; a checkpoint can come between them."""
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    critic = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    train = world.loader(DATA, global_batch=4)
    run = world.run(tmp_path, loader=train, critic=critic, optimizer=optimizer, log_every=1)
    for _ in run.epochs(1):
        for number, (inputs,) in enumerate(train, start=1):
            optimizer.zero_grad()
            loss = critic(inputs).square().mean()
            run.backward(loss)
            optimizer.step()
            if number == len(train):
                run.step(loss=loss)
    run.close()
    steps = [each for each in read_records(tmp_path / "metrics.jsonl") if each["kind"] == "step"]
    assert [each["loss"] for each in steps] == [loss.item()]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda loss: loss / 4, True),
        (lambda loss: loss.div_(4), True),
        (lambda loss: loss / torch.tensor(4.0), True),
        (lambda loss: (loss / 4) * SCALE, True),
        (lambda loss: loss / 3, False),
        (lambda loss: loss * 4, False),
        (lambda loss: loss / 4 + loss, False),
        (lambda loss: loss, False),
    ],
)
def test_a_division_by_the_number_of_batches_is_noticed(change: Any, expected: bool) -> None:
    loss = nn.Linear(3, 1)(torch.ones(2, 3)).square().mean()
    assert is_divided(change(loss), 4) == expected
    assert not is_divided(torch.ones(()), 4)


def test_a_line_says_that_a_loss_is_divided_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _recorded(tmp_path / "1", 1, lambda loss: loss / 1, lambda loss, used: loss)
    assert "division" not in capsys.readouterr().err
    torch.manual_seed(0)
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    model = nn.Linear(3, 1)
    train = world.loader(DATA, global_batch=11, accumulate=2)
    run = world.run(tmp_path / "2", loader=train, model=model)
    for _ in run.epochs(1):
        for (inputs,) in train:
            run.backward(F.mse_loss(model(inputs), inputs[:, :1]) / 2)
            if train.completes_step:
                run.step()
    run.close()
    lines = [line for line in capsys.readouterr().err.splitlines() if "run.backward" in line]
    assert len(lines) == 1
    assert "the loss ends in a division by 2" in lines[0]
