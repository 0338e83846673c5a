"""Scripts of one's own loop that are edited between two sessions of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset, WeightedRandomSampler

from lockstep.config.run_paths import MANIFEST_FILE
from lockstep.errors import CheckpointError
from lockstep.run.checkpoints.checkpoint_format import describe_file
from lockstep.run.connect import TrainingWorld
from lockstep.run.named_states import CHANGED, SETTINGS
from lockstep.run.training_run import TrainingRun
from lockstep.world.launcher_environment import RankInfo

DATA = TensorDataset(torch.zeros(8, 1))
Build = Callable[..., Any]
ADAM, STEP = partial(Adam, lr=0.5), partial(StepLR, step_size=1)


def _script(folder: Path, optimizer: Build = ADAM, scheduler: Build = STEP, **loader: Any) -> TrainingRun:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    model = nn.Linear(1, 1)
    made = optimizer([{"params": model.weight}, {"params": model.bias, "weight_decay": 0.25}])
    states = {"model": model, "optimizer": made, "scheduler": scheduler(made)}
    train = world.loader(DATA, 4, **{"shuffle": True, **loader})
    run = world.run(folder, loader=train, **states)
    for _ in run.epochs(1):
        for (inputs,) in train:
            run.backward(model(inputs).sum())
            made.step()
            run.step()
    run.close()
    return run


WEIGHTED = partial(WeightedRandomSampler, num_samples=8, generator=torch.Generator())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"shuffle": False}, "order shuffle=True, not shuffle=False"),
        ({}, {"shuffle": False, "sampler": RandomSampler(DATA)}, "order shuffle=True, not sampler=RandomSampler"),
        (
            {"shuffle": False, "sampler": SequentialSampler(DATA)},
            {"shuffle": False, "sampler": RandomSampler(DATA)},
            r"order sampler=SequentialSampler \(order \w+\), not sampler=RandomSampler",
        ),
        (
            {"shuffle": False, "sampler": WEIGHTED([1.0] * 8)},
            {"shuffle": False, "sampler": WEIGHTED([1.0] * 4 + [9.0] * 4)},
            "order sampler=WeightedRandomSampler .*, not sampler=WeightedRandomSampler",
        ),
        ({}, {"optimizer": partial(AdamW, lr=0.5)}, "class of optimizer Adam, not AdamW"),
        ({}, {"scheduler": partial(CosineAnnealingLR, T_max=3)}, "class of scheduler StepLR, not CosineAnnealingLR"),
    ],
)
def test_another_order_or_class_is_refused(
    first: dict[str, Any], second: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _script(tmp_path, **first)
    with pytest.raises(CheckpointError, match=f"belongs to another job: it was made with {message}"):
        _script(tmp_path, **second)
    _script(tmp_path, **first)


@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        ({}, []),
        ({"optimizer": partial(Adam, lr=torch.tensor(0.5))}, []),
        ({"optimizer": partial(Adam, lr=0.125)}, ["group 0: lr=0.125", "group 1: lr=0.125"]),
        ({"optimizer": partial(Adam, lr=0.5, weight_decay=0.1)}, ["group 0: weight_decay=0.1"]),
        (
            {"optimizer": partial(Adam, lr=0.5, betas=(0.5, 0.9))},
            ["group 0: betas=[0.5, 0.9]", "group 1: betas=[0.5, 0.9]"],
        ),
        ({"scheduler": partial(StepLR, step_size=7)}, ["step_size=7"]),
    ],
)
def test_each_setting_that_is_not_used_has_a_line(
    edit: dict[str, Any], settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _script(tmp_path)
    for _ in range(2):  # also if the run was resumed with the edit before
        capsys.readouterr()
        _script(tmp_path, **edit)
        lines = [line for line in capsys.readouterr().err.splitlines() if "is not used" in line]
        assert [line.partition(": ")[2].partition(": ")[2].partition(" is not used")[0] for line in lines] == settings


@pytest.mark.parametrize("name", [SETTINGS, CHANGED])
def test_damaged_entry_of_a_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    _script(tmp_path)
    (state,) = tmp_path.glob("checkpoints/step-*/state.json")
    values, manifest = json.loads(state.read_text()), json.loads((state.parent / MANIFEST_FILE).read_text())
    values["job"][name] = ["a\x1b[2J"]
    state.write_text(json.dumps(values))
    manifest["files"]["state.json"] = describe_file(state)
    (state.parent / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not fit this run: 'list' object is not a mapping"):
        _script(tmp_path)
