"""Training gives the same result for any number of workers, compiled or not, frozen or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import NETS, losses, normed_net, small_digits, train_digits, weights_of
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

from lockstep.run.connect import TrainingWorld
from lockstep.train import fit
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World


def _losses_of(size: int, path: Path, **settings: object) -> list[float]:
    common = {"run_dir": path, "epochs": 1, "global_batch_size": 100, "log_every": 1, "lr": 0.2}
    run_in_workers(size, train_digits, "plain", None, None, {**common, **settings})
    return losses(path)


ACCUMULATED = {"accumulate": 3, "label_smoothing": 0.1}
MIXED = {"mixup": 0.2, "cutmix": 1.0, "flip": True, "flip_alternate": True}


@pytest.mark.parametrize(
    ("precision", "tolerance", "extra"),
    [
        ("fp64", 1e-9, {}),
        ("fp64", 1e-9, {**ACCUMULATED, "clip_norm": 0.5, "shift": 1}),
        ("fp64", 1e-9, {**ACCUMULATED, **MIXED}),
    ],
    ids=["plain", "accumulated", "mixed"],
)
def test_1_2_and_3_workers_have_the_same_losses(
    tmp_path: Path, precision: str, tolerance: float, extra: dict[str, object]
) -> None:
    runs = [_losses_of(size, tmp_path / str(size), precision=precision, **extra) for size in (1, 2, 3)]
    assert len(runs[0]) == 15  # 1,437 images in steps of 100, the last one of 37
    assert runs[0][-1] < 0.9 * runs[0][0]  # it does learn
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], abs=tolerance, rel=0)


@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.2, "cutmix": 1.0, "rand_augment": 1, "accumulate": 2}])
def test_worker_without_a_share_of_the_last_step_changes_nothing(tmp_path: Path, mixed: dict[str, object]) -> None:
    runs = []
    for size in (1, 3):
        path = tmp_path / str(size)
        settings = {"run_dir": path, "epochs": 2, "global_batch_size": 12, "log_every": 1, "precision": "fp64", **mixed}
        run_in_workers(size, train_digits, "plain", 25, 7, settings)  # steps of 12, 12 and 1
        runs.append(losses(path))
    assert len(runs[0]) == 6
    assert runs[1] == pytest.approx(runs[0], abs=1e-9, rel=0)


class Jittered(TensorDataset):
    """A user's data set with random augmentation of its own, from all three libraries that people use."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image, label = super().__getitem__(index)
        return image + torch.rand(()) + random.random() + float(np.random.rand()), label


def _fit_jittered(world: World, path: Path, processes: int) -> None:
    images = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = Jittered(images, (images.mean((1, 2, 3)) > 0).long())
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    settings = {"precision": "fp64", "log_every": 1, "track": (), "loader_workers": processes, "lr": 0.1}
    fit(net, data, data, global_batch_size=12, epochs=2, run_dir=path, **settings)


def test_custom_augmentation_is_equal_for_any_number_of_workers(tmp_path: Path) -> None:
    runs = []
    for size, processes in ((1, 0), (2, 1), (3, 0)):
        path = tmp_path / str(size)
        run_in_workers(size, _fit_jittered, path, processes)
        runs.append(losses(path))
    assert len(runs[0]) == 10
    assert runs[0][:5] != runs[0][5:]
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], abs=1e-9, rel=0)


def _draw(world: World, path: Path) -> list[float]:
    drawn: list[float] = []
    net = NETS["plain"]()
    net.register_forward_pre_hook(lambda net, images: drawn.append(float(torch.rand(()))) if net.training else None)
    data = small_digits(24, 8)
    run_with(configure(epochs=1, global_batch_size=8, run_dir=path, track=()), world, data, net)
    return drawn


def test_workers_draw_different_dropout(tmp_path: Path) -> None:
    drawn = run_in_workers(2, _draw, tmp_path / "run")
    assert len({*drawn[0], *drawn[1]}) == 6


def _train(world: World, settings: dict[str, Any]) -> int:
    before = counters["stats"]["unique_graphs"]  # a worker is forked from the tests' process, which may have compiled
    train_digits(world, "plain", 120, 10, settings)
    return counters["stats"]["unique_graphs"] - before


@pytest.mark.filterwarnings("default")  # torch's compiler warns of itself, of other things with each version
def test_compiled_training_is_the_same_training(tmp_path: Path) -> None:
    common = {"epochs": 2, "global_batch_size": 40, "log_every": 1, "lr": 0.1}
    settings = {**common, "run_dir": tmp_path / "plain"}
    assert run_in_workers(2, _train, settings) == [0, 0]
    settings = {**common, "run_dir": tmp_path / "compiled", "compile": True}
    assert min(run_in_workers(2, _train, settings)) > 0
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert len(losses(tmp_path / "compiled")) == 6


@pytest.mark.parametrize("images", [1, 61])
def test_counts_are_exact_for_1_2_and_3_workers(tmp_path: Path, images: int) -> None:
    settings = {"epochs": 1, "global_batch_size": 60, "max_steps": 1, "precision": "fp64"}
    results = []
    for size in (1, 2, 3):
        run = {**settings, "run_dir": tmp_path / str(size)}
        results += run_in_workers(size, train_digits, "plain", 60, images, run)
    assert {result.samples for result in results} == {images}
    assert len({result.top1 for result in results}) == 1
    assert len({result.top5 for result in results}) == 1
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 6, abs=1e-9, rel=0)


def test_workers_stop_after_the_evaluation_on_target(tmp_path: Path) -> None:
    settings = {"epochs": 20, "global_batch_size": 60, "lr": 0.2, "desired_acc": 0.7, "run_dir": tmp_path}
    results = run_in_workers(2, train_digits, "plain", 600, 101, settings)
    assert {result.steps for result in results} == {results[0].steps}
    assert results[0].steps < 200
    assert all(result.top1 >= 0.7 for result in results)


SETTINGS: dict[str, Any] = {
    "epochs": 1,
    "global_batch_size": 60,
    "max_steps": 6,
    "lr": 0.02,
    "log_every": 1,
    "momentum": 0.5,
    "schedule": "constant",
    "loader_workers": 0,
    "track": (),
    "io_every": 0,
    "weight_decay": 0.1,
}


def _fit(world: World, path: Path, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Train all but the first layer; returns the metrics."""
    data = small_digits(360, 100)
    train, val = (TensorDataset(split.images / 255, split.labels) for split in (data.train, data.val))
    torch.manual_seed(0)
    model = normed_net()
    model[0].requires_grad_(False)  # type: ignore[operator]
    result = fit(
        model,
        train,
        val,
        loss=F.cross_entropy,
        metrics={"right": lambda outputs, targets: ((outputs.argmax(1) == targets).sum(), len(targets))},
        run_dir=path,
        **{**SETTINGS, **settings},
    )
    assert result.metrics["right"] == result.top1
    assert result.confusion_matrix is not None
    assert result.confusion_matrix.diagonal().sum() == round(result.top1 * 100)
    return {split: getattr(result.history, split)["loss"].tolist() for split in ("train", "val")}


SHARDED = (2, {"strategy": "ddp", "shard_optimizer": True})
STRATEGIES = [(1, {"strategy": "single"}), (1, {"strategy": "dp"}), (2, {"strategy": "ddp"}), SHARDED]
STRATEGIES += [(2, {"strategy": "horovod"})]


@pytest.mark.parametrize(
    ("workers", "strategy", "precision"),
    [
        *((*strategy, "fp32") for strategy in STRATEGIES),
        *((*SHARDED, precision) for precision in ("O2", "O3")),
    ],
    ids=str,
)
def test_frozen_parameters_stay_and_the_others_learn(
    tmp_path: Path, workers: int, strategy: dict[str, Any], precision: str
) -> None:
    torch.manual_seed(0)
    before = normed_net().state_dict()
    averaged = {} if precision == "O3" else {"ema_decay": 0.5}
    results = run_in_workers(workers, _fit, tmp_path, {"precision": precision, **strategy, **averaged})
    assert all(result == results[0] for result in results)
    course = losses(tmp_path)
    assert min(course[-2:]) < 0.9 * course[0]
    after = weights_of(tmp_path)
    dtype = after["0.weight"].dtype
    assert torch.equal(after["0.weight"], before["0.weight"].to(dtype))
    assert not torch.equal(after["4.weight"], before["4.weight"].to(dtype))


def test_frozen_run_with_mean_loss_is_equal_on_1_2_and_3_workers(tmp_path: Path) -> None:
    settings = {"precision": "fp64", "sync_bn": True, "accumulate": 2, "global_batch_size": 50, "freeze": ["1"]}
    runs = {
        size: run_in_workers(size, _fit, tmp_path / str(size), {**settings, "sync_bn": size > 1})[0]
        for size in (1, 2, 3)
    }
    for size in (2, 3):
        assert losses(tmp_path / str(size)) == pytest.approx(losses(tmp_path / "1"), abs=1e-9)
        assert runs[size]["val"] == pytest.approx(runs[1]["val"], abs=1e-9)


def _train_on_two_loaders(world: World, path: Path, weighs: bool) -> list[float]:
    own = TrainingWorld(world.rank_info, world.device)
    torch.manual_seed(0)
    model = own.prepare(nn.Linear(2, 1, dtype=torch.float64))
    data = [TensorDataset(torch.arange(2.0 * count, dtype=torch.float64).reshape(count, 2)) for count in (9, 11)]
    first, second = (own.loader(each, global_batch=4) for each in data)
    run = own.run(path, loader=first, model=model, second=second)
    for _ in run.epochs(1):
        for (one,), (other,) in zip(first, second, strict=True):
            losses = model(one).square().mean(), model(other).square().mean()
            if weighs:
                (losses[0] * first.weight + losses[1] * second.weight).backward()
            else:
                run.backward(losses[0] + losses[1])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-4 * parameter.grad
                    parameter.grad = None
            run.step()
    run.close()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_another_share_in_a_second_loader_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (alone,) = run_in_workers(1, _train_on_two_loaders, tmp_path / "alone", False)
    for own in run_in_workers(3, _train_on_two_loaders, tmp_path / "weighed", True):
        assert own == pytest.approx(alone, rel=1e-12)
    assert "share" not in capfd.readouterr().err
    run_in_workers(3, _train_on_two_loaders, tmp_path / "mixed", False)
    assert capfd.readouterr().err.count("another loader (TensorDataset) has another share") == 1
