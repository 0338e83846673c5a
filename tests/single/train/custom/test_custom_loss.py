"""A loss of the caller's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from separable import linear_net, separable
from torch import nn

from lockstep.errors import ConfigError
from lockstep.train import Result, fit
from lockstep.train.losses import CustomLoss

CPU = torch.device("cpu")


def _fit(path: Path, **settings: Any) -> Result:
    common: dict[str, Any] = {"epochs": 2, "batch_size": 16, "loader_workers": 0, "track": (), "run_dir": path}
    return fit(linear_net(), separable(330, 1), separable(64, 2), **{**common, **settings})


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none"), F.cross_entropy], ids=["mean", "each", "F"]
)
def test_cross_entropy_as_loss_is_the_same_training(tmp_path: Path, loss: Any) -> None:
    """Also with a last, smaller batch, and cut into passes of different sizes."""
    plain, own = (_fit(tmp_path / name, accumulate=3, precision="fp64", **settings) for name, settings in (
        ("plain", {}), ("own", {"loss": loss})
    ))  # fmt: skip
    assert own.history.train["loss"] == pytest.approx(plain.history.train["loss"], rel=1e-12)
    assert own.loss == pytest.approx(plain.loss, rel=1e-12)


def test_another_loss_is_trained_and_evaluated(tmp_path: Path) -> None:
    def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - F.one_hot(targets, 3)).square().sum(1)

    model = linear_net()
    result = fit(model, separable(320, 1), separable(64, 2), loss=squares, lr=0.01, epochs=2, run_dir=tmp_path)
    images, labels = separable(64, 2).tensors
    with torch.no_grad():
        assert result.loss == pytest.approx(float(squares(model(images), labels).mean()), rel=1e-5)
    assert result.loss < 0.5


def test_a_loss_with_mixed_images_must_be_one_for_each_sample(tmp_path: Path) -> None:
    each = _fit(tmp_path / "each", mixup=0.2, loss=partial(F.cross_entropy, reduction="none"))
    assert each.loss == _fit(tmp_path / "plain", mixup=0.2).loss
    with pytest.raises(ConfigError, match=r'returned the mean, but mixup and cutmix .*reduction="none"'):
        _fit(tmp_path / "mean", mixup=0.2, loss=F.cross_entropy)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, targets: outputs, r"shape \[16, 3\] for 16 samples; return one loss per sample"),
        (lambda outputs, targets: 1.0, "returned a float, not a tensor"),
        (lambda outputs, targets: outputs.detach().mean(), "without a gradient"),
        ("mse", "loss='mse': must be a function"),
        (nn.Sequential(nn.Linear(3, 3)), "has parameters, which fit"),
    ],
)
def test_what_cannot_be_a_loss_is_named(loss: Any, message: str) -> None:
    outputs = torch.randn(16, 3, requires_grad=True)
    with pytest.raises(ConfigError, match=message):
        CustomLoss(loss, CPU)(outputs, torch.zeros(16, dtype=torch.int64))


def test_label_smoothing_is_not_dropped_silently(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="label_smoothing= applies only to the default loss"):
        _fit(tmp_path, loss=F.cross_entropy, label_smoothing=0.1)
