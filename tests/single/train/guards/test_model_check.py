"""What is refused before the first step: a model that does not fit the data, or an epoch's smallest forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.errors import ConfigError
from lockstep.train.fit import configure
from lockstep.train.guards.model_check import check_model, check_training

NORMS = {
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3)),
    "batch norm over pixels": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3)),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.LayerNorm(3)),
    "never": lambda: nn.Linear(7, 3),
}


def _data(samples: int) -> ImageData:
    split = MemorySplit(torch.zeros(samples, 3, 4, 4, dtype=torch.uint8), torch.zeros(samples, dtype=torch.int64))
    return ImageData("blank", ("a", "b", "c"), split, split, InputSpec(3, 4, 4, (0.0,) * 3, (1.0,) * 3))


def _check(samples: int, workers: int, model: str = "batch norm", **settings: Any) -> None:
    check_training(configure(arch="mine", **settings), NORMS[model](), _data(samples), workers)


@pytest.mark.parametrize(
    ("samples", "workers", "settings"),
    [
        pytest.param(9, 1, {"batch_size": 4}, id="the last batch"),
        pytest.param(11, 2, {"batch_size": 4}, id="a share of the last batch"),
        pytest.param(9, 2, {"batch_size": 4}, id="an empty share, which gets a filler"),
        pytest.param(10, 1, {"batch_size": 2, "accumulate": 4}, id="a pass of the last batch"),
        pytest.param(9, 1, {"global_batch_size": 8}, id="a global batch"),
    ],
)
def test_one_image_in_the_last_step_is_refused_with_a_fix(samples: int, workers: int, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mine cannot train .*, but the last step .*; add --drop-last, or change"):
        _check(samples, workers, **settings)
    _check(samples, workers, drop_last=True, **settings)
    _check(samples, workers, max_steps=1, **settings)
    _check(samples, workers, freeze=["2"], **settings)
    for model in NORMS.keys() - {"batch norm"}:
        _check(samples, workers, model, **settings)
    if workers > 1:
        _check(samples, workers, sync_bn=True, strategy="ddp", **settings)


@pytest.mark.parametrize(
    ("samples", "workers", "settings"),
    [
        pytest.param(8, 1, {"batch_size": 1}, id="batches of one"),
        pytest.param(8, 4, {"global_batch_size": 4, "drop_last": True}, id="a global batch of one each"),
        pytest.param(5, 4, {"batch_size": 8}, id="a small set"),
    ],
)
def test_one_image_in_each_step_is_refused_with_a_fix(samples: int, workers: int, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"but a step leaves a worker one: .*; change --batch-size"):
        _check(samples, workers, **settings)


@pytest.mark.parametrize(
    ("samples", "workers", "settings"),
    [(10, 1, {"batch_size": 4}), (12, 2, {"batch_size": 4}), (8, 1, {"batch_size": 4})],
)
def test_two_images_are_enough(samples: int, workers: int, settings: dict[str, Any]) -> None:
    _check(samples, workers, **settings)


class Auxiliary(nn.Module):
    """Returns another form in training mode than in evaluation mode."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.form, self.layers = form, nn.Sequential(nn.Flatten(), nn.Linear(48, 3), nn.BatchNorm1d(3))

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.layers(images)
        return self.form(logits) if self.training else logits


@pytest.mark.parametrize(
    ("form", "got"),
    [
        (lambda logits: (logits, logits), "a tuple"),
        (lambda logits: SimpleNamespace(logits=logits), "a SimpleNamespace"),
        (lambda logits: {"logits": logits}, "a dict"),
        (lambda logits: torch.cat([logits, logits]), r"a tensor of shape \[4, 3\]"),
        (lambda logits: logits[:, 0], r"a tensor of shape \[2\]"),
        (lambda logits: logits[:, :2], r"a tensor of shape \[2, 2\]"),
    ],
    ids=["tuple", "object", "dict", "twice the rows", "one column", "too few columns"],
)
def test_other_outputs_in_training_mode_are_refused(form: Callable[[torch.Tensor], Any], got: str) -> None:
    model = Auxiliary(form)
    before = copy.deepcopy(model.state_dict())
    check_model("mine", model, _data(8))
    with pytest.raises(ConfigError, match=rf"mine:Net returned {got} for two images in training mode; return logits"):
        check_training(configure(arch="mine:Net"), model, _data(8), 1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_that_needs_more_than_two_images_is_not_refused() -> None:
    model = Auxiliary(lambda logits: logits.view(4, -1, 3).flatten(0, 1))
    check_training(configure(arch="mine:Net", batch_size=4), model, _data(8), 1)


def test_smaller_images_of_early_epochs_are_tried() -> None:
    data, model = _data(9), nn.Sequential(nn.Conv2d(3, 3, 2), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check_training(configure(batch_size=4), model, data, 1)
    with pytest.raises(ConfigError, match="cannot train on one image"):
        check_training(configure(batch_size=4, progressive_sizes=["0:2", "1:4"]), model, data, 1)
