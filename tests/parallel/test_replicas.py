"""Workers that drift apart, or that begin different jobs, are found on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import NETS, small_digits
from torch import nn
from worker_group import on_workers, run_in_workers

from lockstep.errors import ConfigError, ReplicasDifferError
from lockstep.run.replicas import are_finite
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

SETTINGS = {"epochs": 2, "global_batch_size": 60, "lr": 0.05, "lr_scaling": "none", "track": ()}
TRAIN, VAL = 240, 50  # epochs of 4 steps


class Straying(nn.Module):
    """A network that changes one of its weights by one bit, on one worker, in its forward pass of a given step."""

    def __init__(self, net: nn.Module, step: int):
        super().__init__()
        self.net, self._step, self._passes = net, step, 0

    def forward(self, images: Any) -> Any:
        if self.training:
            self._passes += 1
            if self._passes == self._step:
                bias = list(self.net.parameters())[3].detach()
                bias[2:3].view(torch.int32).add_(1)
        return self.net(images)


def _stray(world: World, path: Path, step: int, settings: dict[str, Any]) -> tuple[str, int]:
    seed_all(0, 0, 0)
    net = NETS[settings.pop("net", "plain")]()
    model = Straying(net, step if world.rank == world.size - 1 else 0)
    try:
        run_with(configure(**{**SETTINGS, "run_dir": path, **settings}), world, small_digits(TRAIN, VAL), model)
    except ReplicasDifferError as error:
        return str(error), error.exit_code
    return "", 0


@pytest.mark.parametrize(
    ("size", "settings", "found", "who"),
    [
        (2, {"check_replicas": 2}, 4, ("workers 0 on ", " differ from one another")),
        (3, {"check_replicas": 1, "strategy": "horovod"}, 3, ("worker 2 on ", " differs from the other 2")),
        (2, {}, 4, ("workers 0 on ",)),  # before the epoch's checkpoint, though the next check is far
    ],
)
def test_a_bit_that_differs_on_one_worker_is_found_on_all(
    tmp_path: Path, size: int, settings: dict[str, Any], found: int, who: tuple[str, ...]
) -> None:
    outcomes = run_in_workers(size, _stray, tmp_path, 3, settings)
    assert len(set(outcomes)) == 1
    said, code = outcomes[0]
    assert code == 7
    assert said.startswith(f"the replicas differ after step {found}: ")
    assert all(words in said for words in who)
    assert "first in net.3.bias" in said
    assert not list((tmp_path / "checkpoints").glob(f"step-*{found}"))


@pytest.mark.parametrize("settings", [{"check_replicas": 0, "checkpoint_epochs": 0}, {"check_replicas": 1}])
def test_nothing_is_reported_unless_checked_and_wrong(tmp_path: Path, settings: dict[str, Any]) -> None:
    step = 0 if settings["check_replicas"] else 3
    assert run_in_workers(2, _stray, tmp_path, step, {"net": "lively", **settings}) == [("", 0)] * 2


@on_workers(2)
def test_all_agree_that_one_workers_unchecked_weights_are_nan(world: World) -> None:
    net = nn.Linear(2, 2)
    if world.rank == 1:
        nn.init.constant_(net.bias, float("nan"))
    assert not are_finite(world, net)


def test_equal_replicas_stay_equal_with_what_they_share(tmp_path: Path) -> None:
    settings = {"net": "normed", "check_replicas": 1, "epochs": 1, "sync_bn": True, "precision": "O2"}
    assert run_in_workers(2, _stray, tmp_path, 0, settings) == [("", 0)] * 2


def _begin(world: World, path: Path, samples: list[int], rates: list[float]) -> str:
    data = small_digits(samples[world.rank], VAL)
    config = configure(**{**SETTINGS, "run_dir": path, "lr": rates[world.rank]})
    with pytest.raises(ConfigError) as caught:
        run_with(config, world, data, NETS["plain"]())
    return str(caught.value)


@pytest.mark.parametrize(
    ("samples", "rates", "words"),
    [
        ([240, 180], [0.1, 0.1], "worker 1's data differs from worker 0's: number of training samples is 180, not 240"),
        ([240, 240], [0.1, 0.2], "worker 1's configuration differs from worker 0's: optim.lr is 0.2, not 0.1"),
    ],
)
def test_workers_of_different_jobs_are_refused_on_all(
    tmp_path: Path, samples: list[int], rates: list[float], words: str
) -> None:
    outcomes = run_in_workers(2, _begin, tmp_path / "run", samples, rates)
    assert len(set(outcomes)) == 1
    assert words in outcomes[0]
    assert not (tmp_path / "run").exists()
