"""Optimizers and schedulers of the caller's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import final_weights, weights_of
from separable import fit_separable, linear_net, separable
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from worker_group import run_in_workers

from lockstep.errors import CheckpointError, ConfigError
from lockstep.train import Callback, TrainingState, fit
from lockstep.world.world import World

STEPS = 4  # an epoch


class Rates(Callback):
    """The rates and momenta that the steps had."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.betas: list[float] = []

    def on_step_end(self, run: TrainingState) -> None:
        (group,) = run.optimizer.param_groups
        self.seen.append(group["lr"])
        self.betas.append(group.get("betas", [0])[0])


def _rates(path: Path, **settings: Any) -> list[float]:
    rates = Rates()
    fit_separable(path, callbacks=[rates], **settings)
    return rates.seen


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps on whole batches in the order in which `fit` takes them."""
    from lockstep.data.sharding import Sharding

    images, labels = separable(64, 1).tensors
    for samples in [part for epoch in range(3) for part in Sharding(64, 16, 0, 1, 0).epoch(epoch)][:steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[samples]), labels[samples]).backward()
        optimizer.step()


@pytest.mark.parametrize("form", ["object", "class", "function"])
def test_it_takes_the_steps_of_a_manual_loop(tmp_path: Path, form: str) -> None:
    model, own = linear_net(), linear_net()
    if form == "object":
        given: Any = RMSprop(model.parameters(), lr=0.01, momentum=0.5)
    else:
        given = partial(RMSprop, lr=0.01, momentum=0.5)
        given = given if form == "class" else lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5)
    fit_separable(tmp_path, model, optimizer=given)
    _by_hand(own, RMSprop(own.parameters(), lr=0.01, momentum=0.5), 3 * STEPS)
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64", "O1", "O2", "O3"])
def test_an_optimizer_trains_in_every_precision_and_resumes(tmp_path: Path, precision: str) -> None:
    def run(name: str, **settings: Any) -> None:
        model = linear_net()
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        result = fit_separable(tmp_path / name, model, optimizer=optimizer, precision=precision, **settings)
        assert result.history.train["loss"][-1] < 0.7 * result.history.train["loss"][0]

    run("whole")
    run("parts", max_steps=2 * STEPS)
    run("parts", resume="auto")
    assert final_weights(tmp_path / "parts") == final_weights(tmp_path / "whole")


def test_groups_keep_their_rates_and_earlier_state(tmp_path: Path) -> None:
    model = linear_net()
    linear: Any = model[1]  # type: ignore[index]
    optimizer = SGD([{"params": [linear.weight], "lr": 0.1}, {"params": [linear.bias], "lr": 0.0}], momentum=0.9)
    _by_hand(model, optimizer, STEPS)
    before, momentum = linear.bias.clone(), optimizer.state[linear.weight]["momentum_buffer"].clone()
    fit_separable(tmp_path, model, optimizer=optimizer, precision="O2", max_steps=1)
    weights = weights_of(tmp_path)
    assert torch.equal(weights["1.bias"], before)
    assert not torch.equal(weights["1.weight"], linear.weight)
    (state,) = [each for parameter, each in optimizer.state.items() if parameter.shape == momentum.shape]
    assert state["momentum_buffer"].dtype == torch.float32  # with the master weights
    assert float((state["momentum_buffer"] - 0.9 * momentum).abs().max()) < float(momentum.abs().max())


SCHEDULERS: dict[str, tuple[Any, str]] = {
    "StepLR": (lambda optimizer: StepLR(optimizer, 1, gamma=0.5), "epoch"),
    "MultiStepLR": (lambda optimizer: MultiStepLR(optimizer, [2, 7]), "step"),
    "LambdaLR": (lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), "step"),
    "OneCycleLR": (lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=3 * STEPS), "step"),
    "SequentialLR": (
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 9)], milestones=[3]
        ),
        "step",
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_rates_match_a_manual_loop_and_its_resume(tmp_path: Path, name: str) -> None:
    factory, interval = SCHEDULERS[name]
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = factory(optimizer)
    expected = []
    for step in range(1, 3 * STEPS + 1):
        optimizer.step()
        expected.append(optimizer.param_groups[0]["lr"])
        if (interval == "step" or step % STEPS == 0) and step < 3 * STEPS:
            scheduler.step()
    settings = {"optimizer": partial(AdamW, lr=0.01), "scheduler": factory, "scheduler_interval": interval}
    assert _rates(tmp_path / "whole", **settings) == expected
    first = _rates(tmp_path / "parts", max_steps=7, **settings)
    assert first + _rates(tmp_path / "parts", resume="auto", **settings) == expected
    assert final_weights(tmp_path / "parts") == final_weights(tmp_path / "whole")


def test_plateaus_go_by_the_validation_loss_also_after_a_resume(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {
            "optimizer": partial(SGD, lr=1e-9),  # whose loss stays
            "scheduler": partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.1, eps=0),
        }

    assert _rates(tmp_path / "run", max_steps=9, **settings()) == [1e-9] * 8 + [5e-10]
    elsewhere = Rates()
    result = fit_separable(tmp_path / "other", resume=tmp_path / "run", callbacks=[elsewhere], **settings())
    assert elsewhere.seen == [5e-10] * 3
    assert result.history.val["epoch"].tolist() == [1, 2, 3]
    again = fit_separable(tmp_path / "other", resume="auto", **settings())
    assert again.history.val["epoch"].tolist() == [1, 2, 3]
    assert _rates(tmp_path / "run", resume="auto", **settings()) == [5e-10] * 3


def test_plateau_schedule_reports_missing_earlier_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"optimizer": partial(SGD, lr=0.1), "scheduler": ReduceLROnPlateau}
    fit_separable(tmp_path, max_steps=4, **settings)
    (tmp_path / "metrics.jsonl").unlink()
    fit_separable(tmp_path, resume="auto", **settings)
    assert (
        "ReduceLROnPlateau continues without the validation loss of epoch 1: not in the records"
        in capsys.readouterr().out
    )


class Growing(SGD):
    """Keeps what it learns in its groups, as Prodigy keeps `d` and schedule-free optimizers `k`."""

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["d"] = 0.01

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] *= 1.5
            for parameter in group["params"]:
                parameter.data.sub_(group["d"] * group["lr"] * parameter.grad)


@pytest.mark.parametrize("scheduler", [None, partial(StepLR, step_size=1, gamma=0.5)])
def test_values_in_optimizer_groups_survive_a_resume(tmp_path: Path, scheduler: Any) -> None:
    settings: dict[str, Any] = {"optimizer": partial(Growing, lr=0.1), "scheduler": scheduler}
    whole = _rates(tmp_path / "whole", **settings)
    parts = _rates(tmp_path / "parts", max_steps=6, **settings)
    assert parts + _rates(tmp_path / "parts", resume="auto", **settings) == whole
    assert final_weights(tmp_path / "parts") == final_weights(tmp_path / "whole")


def test_a_rate_that_a_callback_sets_goes_on_after_a_resume(tmp_path: Path) -> None:
    class Lower(Callback):
        def on_step_end(self, run: TrainingState) -> None:
            if run.step == 3:
                run.optimizer.param_groups[0]["lr"] = 0.01

    fit_separable(tmp_path, optimizer=partial(SGD, lr=0.1), callbacks=[Lower()], max_steps=4)
    assert _rates(tmp_path, optimizer=partial(SGD, lr=0.1), resume="auto") == [0.01] * 8


def test_a_scheduler_beside_a_named_optimizer_starts_at_lr(tmp_path: Path) -> None:
    rates = _rates(tmp_path, optimizer="adamw", lr=0.02, scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.1))
    assert rates == pytest.approx([0.02] * 2 * STEPS + [0.002] * STEPS)


def _sharded(world: World, path: Path, **more: Any) -> None:
    train = separable(64, 1)
    settings: dict[str, Any] = {"global_batch_size": 16, "epochs": 2, "track": (), "loader_workers": 0}
    settings |= {"strategy": "ddp", "shard_optimizer": world.size > 1}
    model = linear_net().double()
    optimizer = partial(AdamW, lr=0.01)
    scheduler = partial(StepLR, step_size=1)
    fit(
        model,
        train,
        separable(32, 2),
        optimizer=optimizer,
        scheduler=scheduler,
        precision="fp64",
        run_dir=path / str(world.size),
        **{**settings, **more},
    )


def _switch(world: World, path: Path) -> None:
    _sharded(world, path, max_steps=4)
    _sharded(world, path, shard_optimizer=False, resume="auto")


def test_a_run_goes_on_with_the_optimizer_no_longer_sharded(tmp_path: Path) -> None:
    run_in_workers(2, _switch, tmp_path)
    assert max((tmp_path / "2" / "checkpoints").glob("step-*")).name == "step-00000008"


def test_function_builds_every_share_of_a_sharded_optimizer(tmp_path: Path) -> None:
    for size in (1, 2):
        run_in_workers(size, _sharded, tmp_path)
    for alone, sharded in zip(weights_of(tmp_path / "1").values(), weights_of(tmp_path / "2").values(), strict=True):
        torch.testing.assert_close(sharded, alone, rtol=0, atol=1e-12)


def test_a_run_with_another_optimizer_does_not_go_on(tmp_path: Path) -> None:
    fit_separable(tmp_path, optimizer=partial(SGD, lr=0.1), max_steps=4)
    with pytest.raises(CheckpointError, match="--optimizer SGD, not AdamW"):
        fit_separable(tmp_path, optimizer=partial(AdamW, lr=0.1), resume="auto")


def _foreign() -> Any:
    return SGD([nn.Parameter(torch.zeros(2, 3))], lr=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sdg"}, "optimizer='sdg': must be one of sgd, adam, adamw, lars, lamb, muon"),
        ({"optimizer": 3}, "optimizer=3: must be a name"),
        ({"optimizer": lambda parameters: None}, "optimizer=.*must be a name"),
        ({"optimizer": _foreign()}, r"shape \[2, 3\] that is not in the model"),
        ({"optimizer": partial(LBFGS, lr=1)}, "LBFGS"),
        ({"optimizer": partial(AdamW, lr=torch.tensor(0.1))}, "its lr is a Tensor"),
        ({"optimizer": AdamW, "lr": 0.3}, "lr= has no effect with optimizer=type"),
        ({"optimizer": AdamW, "schedule": "step", "warmup_epochs": 1}, "schedule=, warmup_epochs= has no effect"),
        ({"scheduler": partial(StepLR, step_size=1), "lr_final": 0.1}, "lr_final= has no effect with scheduler="),
        ({"scheduler": "cosine"}, "scheduler='cosine': must be a torch.optim.lr_scheduler scheduler"),
        ({"scheduler": StepLR(_foreign(), 1)}, "scheduler= was built for another optimizer"),
        ({"scheduler": partial(StepLR, step_size=1), "scheduler_interval": "batch"}, "scheduler_interval='batch'"),
        ({"scheduler": ReduceLROnPlateau, "scheduler_interval": "step"}, "does not work with ReduceLROnPlateau"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_separable(tmp_path, **settings)


class Nested(SGD):
    """Keeps lists of tensors, as Shampoo and SOAP do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before, (count,) = state.get("GG", [torch.zeros_like(parameter), (0,)])
                state["GG"] = [before + parameter.grad, (count + 1,)]
                parameter.data.sub_(group["lr"] * state["GG"][0] / state["GG"][1][0])


def test_lists_of_tensors_in_the_state_go_on_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": partial(Nested, lr=0.1)}
    fit_separable(tmp_path / "whole", **settings)
    fit_separable(tmp_path / "parts", max_steps=6, **settings)
    fit_separable(tmp_path / "parts", resume="auto", **settings)
    assert final_weights(tmp_path / "parts") == final_weights(tmp_path / "whole")


class TensorInGroup(SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["d"] = torch.zeros(())


class SetInMapping(SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["means"] = {"a": {1}}


@pytest.mark.parametrize(
    ("kind", "message"),
    [(TensorInGroup, "optimizer=: its d is a Tensor"), (SetInMapping, "optimizer=: its means.a is a set")],
)
def test_what_no_checkpoint_can_hold_is_named_at_the_first_one(tmp_path: Path, kind: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_separable(tmp_path, optimizer=partial(kind, lr=0.1))


def test_an_object_cannot_be_sharded(tmp_path: Path) -> None:
    model = linear_net()
    with pytest.raises(ConfigError, match="shard_optimizer=True needs optimizer= as a function"):
        fit_separable(tmp_path, model, optimizer=SGD(model.parameters(), lr=0.1), shard_optimizer=True, strategy="ddp")
