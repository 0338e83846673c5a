"""The training loop, its metrics, and a run's folder."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import NETS, small_digits, train_digits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.data.sets import Batch
from lockstep.files.jsonl import read_records
from lockstep.run.records.trackers import PlainConsole
from lockstep.train import loop, worker_times
from lockstep.train.fit import configure
from lockstep.train.loop import split_batch
from lockstep.train.metrics import Measures, Meter, Totals, losses_of
from lockstep.train.run import run_with
from lockstep.world import step_clock
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


def _mixed(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    labels, others = (torch.randint(0, 5, (count,), generator=generator) for _ in range(2))
    shares = 0.5 + 0.5 * torch.rand(count, generator=generator)
    return Batch(torch.randn(count, 3, 2, 2, generator=generator), labels, torch.ones(count), others, shares)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_a_mixed_image_weighs_both_labels_losses(smoothing: float) -> None:
    batch, logits = _mixed(6), torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    criterion = partial(F.cross_entropy, reduction="none", label_smoothing=smoothing)
    losses = losses_of(criterion, logits, batch)
    for row in range(6):
        target = torch.full((5,), smoothing / 5)
        target[batch.labels[row]] += (1 - smoothing) * batch.shares[row]
        target[batch.others[row]] += (1 - smoothing) * (1 - batch.shares[row])
        assert float(losses[row]) == pytest.approx(float(-(target * logits[row].log_softmax(0)).sum()), rel=1e-5)
    plain = batch._replace(others=None, shares=None)
    assert torch.equal(losses_of(criterion, logits, plain), criterion(logits, batch.labels))


@pytest.mark.parametrize(("count", "passes", "sizes"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (4, 1, [4])])
def test_a_batch_is_split_with_all_that_belongs_to_its_samples(count: int, passes: int, sizes: list[int]) -> None:
    batch = _mixed(count)
    parts = split_batch(batch, passes)
    assert [len(part.labels) for part in parts] == sizes
    for whole, pieces in zip(batch, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat([piece for piece in pieces if piece is not None]), whole)
    plain = split_batch(Batch(batch.images, batch.labels), passes)
    assert all(part.weights is part.others is part.shares is None for part in plain)


def test_all_generators_are_seeded_for_each_step(tmp_path: Path) -> None:
    """Dropout is the same in a job that repeats a step."""
    drawn: list[tuple[float, float, float]] = []

    def draw(network: nn.Module, _: object) -> None:
        if network.training:
            drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    config = configure(max_steps=2, epochs=1, batch_size=8, device="cpu", track=())
    for run in range(2):
        run_config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=tmp_path / str(run)))
        network = NETS["lively"]()
        network.register_forward_pre_hook(draw)
        run_with(run_config, World(RankInfo(), torch.device("cpu")), small_digits(32, 8), network)
    assert len(drawn) == 4
    assert drawn[:2] == drawn[2:]


def test_a_short_last_step_has_the_mean_over_its_own_samples(tmp_path: Path) -> None:
    labels: list[torch.Tensor] = []

    def follow(network: nn.Module, _: object, logits: torch.Tensor) -> None:
        if network.training:
            chances = logits.detach().softmax(1)
            logits.register_hook(lambda gradient: labels.append(chances - len(chances) * gradient))

    config = configure(epochs=1, batch_size=8, device="cpu", track=(), run_dir=tmp_path / "run")
    network = NETS["plain"]()
    network.register_forward_hook(follow)
    run_with(config, World(RankInfo(), torch.device("cpu")), small_digits(14, 8), network)
    assert [len(each) for each in labels] == [8, 6]
    for each in labels:
        torch.testing.assert_close(each, F.one_hot(each.argmax(1), each.shape[1]).float())


def test_rate_includes_checkpoints_and_excludes_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*args, **options)

        return slow

    changes: list[tuple[Any, str, Any]] = [
        *((module, "time", SimpleNamespace(perf_counter=lambda: now)) for module in (loop, worker_times, step_clock)),
        (loop, "take_step", taking(1.0, loop.take_step)),
        (loop, "save", taking(5.0, loop.save)),
        (loop, "evaluate", taking(50.0, loop.evaluate)),
    ]
    for module, name, value in changes:
        monkeypatch.setattr(module, name, value)
    settings = {"epochs": 2, "batch_size": 8, "checkpoint_steps": 3, "snapshot_steps": 2, "run_dir": tmp_path / "run"}
    world = World(RankInfo(snapshots=tmp_path / "memory"), torch.device("cpu"))
    result = train_digits(world, "plain", 64, 8, settings)

    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    by_step = {r["step"]: r["samples"] / r["images_per_second"] for r in records if r["kind"] == "step"}
    # Saved after steps 2, 3, 4, 6, 8 (twice), 9, 10, 12, 14, 15 and 16; the time counts in the next record.
    assert by_step == pytest.approx({2: 2, 3: 6, 4: 6, 6: 7, 8: 7, 9: 11, 10: 6, 12: 7, 14: 7, 15: 6, 16: 6})
    of_epochs = [
        (r["epoch_seconds"], r["samples"] / r["images_per_second"], r["time_seconds"])
        for r in records
        if r["kind"] == "epoch" and r["split"] == "train"
    ]
    assert of_epochs == [pytest.approx((28, 28, 28)), pytest.approx((43, 43, 71))]
    assert [r["epoch_seconds"] for r in records if r.get("split") == "val"] == [50, 50]
    assert result.seconds == pytest.approx(71)


def test_a_measurement_gets_each_step_and_what_comes_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | str] = []
    study = SimpleNamespace(
        follow_trainer=lambda clock: seen.append("training"),
        take_step=lambda samples: seen.append(samples),
        interrupt=lambda: seen.append("interrupted"),
    )
    monkeypatch.setattr(loop.observer, "current", study)
    settings = {"epochs": 2, "batch_size": 8, "checkpoint_steps": 2, "run_dir": tmp_path / "run"}
    train_digits(World(RankInfo(), torch.device("cpu")), "plain", 30, 8, settings)
    epoch = ["interrupted", 8, 8, "interrupted", 8, 6]
    assert seen == ["training", *epoch, *epoch]


def test_last_epoch_has_the_steps_left_and_a_resume_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[tuple[int, ...]] = []
    monkeypatch.setattr(PlainConsole, "begin_epoch", lambda self, *numbers: begun.append(numbers))
    world, settings = World(RankInfo(), torch.device("cpu")), {"epochs": 2, "batch_size": 8, "run_dir": tmp_path}
    train_digits(world, "plain", 64, 8, {**settings, "max_steps": 11})
    train_digits(world, "plain", 64, 8, {**settings, "resume": "auto"})
    assert begun == [(0, 2, 8, 0), (1, 2, 3, 0), (1, 2, 8, 3)]  # epoch from 0, epochs, steps, steps done before
    assert "resumed after step 11 (epoch 2)" in capsys.readouterr().out.splitlines()


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


def test_sums_have_the_same_bits_whenever_they_are_reduced() -> None:
    generator = torch.Generator().manual_seed(0)
    often, late, losses = _meter(), _meter(), torch.empty(64)  # one buffer, as a custom loss may have
    steps: list[Totals] = []
    for _ in range(150):
        losses.copy_(torch.rand(64, generator=generator))
        logits, labels = torch.randn(64, 9, generator=generator), torch.randint(0, 9, (64,), generator=generator)
        for meter in (often, late):
            meter.add(losses, logits, labels)
            meter.end_step()
        steps += often.reduce()
    assert late.reduce() == steps
    assert len(set(steps)) == 150


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


def test_devices_without_float64_count_in_float32(accelerators: Callable[..., None]) -> None:
    accelerators(sum_dtype=torch.float32)
    world = World(RankInfo(), torch.device("cpu"))
    meter, measures = Meter(world), Measures({"hits": lambda outputs, targets: (1, 2)}, 6, world)
    with WithoutFloat64():
        for weights in (None, torch.tensor([0.0, 1, 1])):
            meter.add(torch.tensor([1.0, 2.0, 4.0]), LOGITS, LABELS, weights)
            meter.end_step()
        assert meter.reduce() == [Totals(7, 1, 2, 3), Totals(6, 0, 1, 2)]
        assert meter.reduce_passes() == Totals(0, 0, 0, 0)
        measures.add(LOGITS, LABELS)
        assert measures.reduce().metrics == {"hits": 0.5}


def test_steps_without_classes_have_only_a_loss() -> None:
    meter = Meter(World(RankInfo(), torch.device("cpu")), has_classes=False)
    for weights in (None, None, torch.tensor([0.0, 1, 1])):
        meter.add(torch.tensor([1.0, 2.0, 4.0]), {"out": LOGITS}, {"mask": LABELS}, weights)
        meter.end_step()
    assert meter.reduce() == [Totals(loss=7, count=3)] * 2 + [Totals(loss=6, count=2)]
    assert Totals(loss=6, count=2).figures(has_classes=False) == {"loss": 3, "samples": 2}


def test_nested_batches_are_split_by_sample() -> None:
    batch = Batch(
        {"ids": torch.arange(10).view(5, 2), "more": (torch.arange(5),)}, [torch.arange(5) + 7], torch.ones(5)
    )
    first, second = split_batch(batch, 2)
    assert first.images["more"][0].tolist() == [0, 1, 2]
    assert second.images["ids"].tolist() == [[6, 7], [8, 9]]
    assert second.labels[0].tolist() == [10, 11]
    assert len(second.weights) == 2
