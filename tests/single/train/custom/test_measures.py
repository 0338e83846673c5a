"""Custom metrics and losses."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from separable import fit_separable, linear_net, separable
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset
from worker_group import on_workers, run_in_workers

from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.train import fit
from lockstep.train.metrics import CustomLoss, Measured, Measures
from lockstep.world.world import World

Tensor = torch.Tensor


def _recall(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of 3 classes."""
    right = outputs.argmax(1) == targets
    return torch.bincount(targets[right], minlength=3), torch.bincount(targets, minlength=3)


def _confidence(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return outputs.softmax(1).max(1).values.sum(), len(targets)


METRICS = {"recall": _recall, "confidence": _confidence}


def _measure(world: World, samples: int) -> Measured:
    """A worker's share in uneven batches; with fewer samples than workers some have none."""
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(samples, 3, generator=generator).double(), torch.arange(samples) % 2
    measures = Measures(METRICS, 3, world)
    for part in torch.arange(samples)[world.rank :: world.size].split(3):
        if len(part):
            measures.add(outputs[part], targets[part])
    measured = measures.reduce()
    assert measures.reduce().confusion.sum() == 0  # nothing is counted twice
    return measured


@pytest.mark.parametrize("samples", [20, 2])
def test_sums_over_workers_are_those_of_one(samples: int) -> None:
    (alone,), several = run_in_workers(1, _measure, samples), run_in_workers(3, _measure, samples)
    for measured in several:
        np.testing.assert_array_equal(measured.confusion, alone.confusion)
        np.testing.assert_allclose(measured.metrics["recall"], alone.metrics["recall"])
        assert measured.metrics["confidence"] == pytest.approx(alone.metrics["confidence"], rel=1e-12)
    assert alone.confusion.sum() == samples
    assert list(np.isnan(alone.metrics["recall"])) == [False, False, True]


def test_a_fit_reports_them_by_epoch_and_in_its_result(tmp_path: Path) -> None:
    val = separable(64, 2)
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 24, "loader_workers": 0, "track": (), "run_dir": tmp_path}
    model = linear_net()
    result = fit(model, separable(320, 1), val, metrics=METRICS, lr=0.02, **settings)

    images, labels = val.tensors
    with torch.no_grad():
        predicted = model(images).argmax(1)
    expected = np.zeros((3, 3), dtype=np.int64)
    np.add.at(expected, (labels.numpy(), predicted.numpy()), 1)
    np.testing.assert_array_equal(result.confusion_matrix, expected)
    assert result.classes == ("0", "1", "2")
    assert result.per_class_accuracy == {str(k): expected[k, k] / expected[k].sum() for k in range(3)}
    np.testing.assert_allclose(result.metrics["recall"], expected.diagonal() / expected.sum(1))
    assert result.history.val["recall"].shape == (2, 3)
    assert result.history.val["confidence"].shape == (2,)
    records = [r for r in read_records(tmp_path / "metrics.jsonl") if r.get("split") == "val"]
    assert [r["metrics"]["confidence"] for r in records] == list(result.history.val["confidence"])


def test_ties_count_alike_in_top1_and_by_class(tmp_path: Path) -> None:
    images, labels = torch.zeros(64, 1, 8, 8), torch.arange(64).clamp(max=15)  # of the last class most
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    nn.init.zeros_(model[1].bias)
    data = TensorDataset(images, labels)
    result = fit(model, data, data, optimizer=partial(SGD, lr=0.0), epochs=1, track=(), run_dir=tmp_path)
    assert result.confusion_matrix.trace() / 64 == result.top1


def test_class_without_samples_has_no_accuracy_but_valid_json(tmp_path: Path) -> None:
    images, labels = separable(64, 2).tensors
    val = TensorDataset(images[labels != 1], labels[labels != 1])
    result = fit(
        linear_net(), separable(320, 1), val, metrics={"recall": _recall}, epochs=1, track=(), run_dir=tmp_path
    )
    assert math.isnan(result.per_class_accuracy["1"])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert np.isnan(result.history.val["recall"][0, 1])


@on_workers(2)
def test_a_model_may_have_more_outputs_than_the_data_has_classes(world: World) -> None:
    measures = Measures({}, 2, world)
    if world.rank == 0:  # the others have no batch, and so do not see how many outputs there are
        measures.add(torch.eye(5), torch.tensor([0, 1, 0, 1, 0]))
    measured = measures.reduce()
    assert measured.confusion.shape == (5, 5)
    assert measured.confusion.sum(1).tolist() == [3, 2, 0, 0, 0]
    assert measured.confusion.sum(0).tolist() == [1] * 5


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": _recall}, "metrics= 'loss': the name must be"),
        ({"a b": _recall}, "metrics= 'a b': the name must be"),
        ({"f1": 0.5}, r"metrics=\{'f1': 0.5\}: must be a function"),
        ({"f1": lambda outputs, targets: outputs.mean()}, r"returned .*; it must be a function .* \(sum, count\)"),
        ({"f1": lambda outputs, targets: (outputs.sum(0), torch.ones(2))}, "returned .*; it must be a function"),
        ({"f1": lambda outputs, targets: (outputs[:, 0], len(targets))}, "the same for every batch"),
    ],
)
def test_what_cannot_be_a_metric_is_named(tmp_path: Path, metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(
            linear_net(), separable(32, 1), separable(33, 2), metrics=metrics, batch_size=16, track=(), run_dir=tmp_path
        )


CPU = torch.device("cpu")


_fit = partial(fit_separable, epochs=2, train=330, val=64)


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
