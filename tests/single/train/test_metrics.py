"""Metrics are sums and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.train.metrics import CustomMeasures, Meter, Totals
from lockstep.world import accelerator
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

LOGITS = torch.tensor([[9.0, 1, 2, 3, 4, 5], [1, 9, 8, 7, 6, 5], [0, 1, 2, 3, 4, 5]])
LABELS = torch.tensor([0, 5, 0])  # first, fifth and last of six


def _meter() -> Meter:
    return Meter(World(RankInfo(), torch.device("cpu")))


def test_top1_and_top5_count_right_answers() -> None:
    meter = _meter()
    meter.add(torch.tensor([1.0, 2.0, 4.0]), LOGITS, LABELS)
    meter.end_step()
    (totals,) = meter.reduce()
    assert totals == Totals(loss=7, top1=1, top5=2, count=3)
    assert totals.figures() == {"loss": pytest.approx(7 / 3), "top1": 1 / 3, "top5": 2 / 3, "samples": 3}


def test_weight_0_counts_nothing() -> None:
    meter = _meter()
    meter.add(torch.tensor([1.0, 2.0, 4.0]), LOGITS, LABELS, torch.tensor([0.0, 1, 1]))
    meter.end_step()
    assert meter.reduce() == [Totals(loss=6, top1=0, top5=1, count=2)]


def test_passes_add_up_to_their_step_and_steps_stay_apart() -> None:
    meter = _meter()
    for passes in (2, 1):
        for _ in range(passes):
            meter.add(torch.ones(3), LOGITS, LABELS)
        meter.end_step()
    assert [totals.count for totals in meter.reduce()] == [6, 3]
    assert meter.reduce() == []


def test_evaluation_without_own_images_still_takes_part() -> None:
    assert _meter().reduce_passes() == Totals()


def test_nan_logits_are_never_right_for_every_label() -> None:
    meter = _meter()
    for label in range(6):
        meter.add(torch.full((1,), float("nan")), torch.full((1, 6), float("nan")), torch.tensor([label]))
    assert meter.reduce_passes().top1 <= 1


def test_fewer_than_five_classes_make_top5_certain() -> None:
    meter = _meter()
    meter.add(torch.zeros(2), torch.tensor([[0.0, 1], [0, 1]]), torch.tensor([0, 1]))
    assert meter.reduce_passes() == Totals(loss=0, top1=1, top5=2, count=2)


class WithoutFloat64(TorchDispatchMode):
    """As on Apple's GPUs: no operation returns float64."""

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        assert getattr(result, "dtype", None) != torch.float64, function
        return result


def test_devices_without_float64_count_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "sum_dtype", lambda device: torch.float32)
    world = World(RankInfo(), torch.device("cpu"))
    meter, measures = Meter(world), CustomMeasures({"hits": lambda outputs, targets: (1, 2)}, 6, world)
    with WithoutFloat64():
        for weights in (None, torch.tensor([0.0, 1, 1])):
            meter.add(torch.tensor([1.0, 2.0, 4.0]), LOGITS, LABELS, weights)
            meter.end_step()
        assert meter.reduce() == [Totals(7, 1, 2, 3), Totals(6, 0, 1, 2)]
        assert meter.reduce_passes() == Totals(0, 0, 0, 0)
        measures.add(LOGITS, LABELS)
        assert measures.reduce().metrics == {"hits": 0.5}
