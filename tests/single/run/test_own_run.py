"""The run of one's own loop, in one process: resumes, records, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset, WeightedRandomSampler
from worker_group import run_in_workers

import lockstep
from lockstep.cli import main
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError, NonFiniteLossError
from lockstep.files.io_records import worker_file
from lockstep.files.jsonl import read_records
from lockstep.models.global_batch_norm import GlobalBatchNorm
from lockstep.run.connect import TrainingWorld
from lockstep.run.named_states import Extra
from lockstep.run.replicas import check_shares
from lockstep.world.generations import HostsChangedError
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

BATCH = nn.BatchNorm1d(4)
generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(22, 4, generator=generator), torch.randint(0, 3, (22,), generator=generator))


class End(HostsChangedError):
    """Raised by a loop to end it."""


class Loop:
    """A small training with dropout, an average of the weights and a schedule by step."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any] | None = None,
        loader: dict[str, Any] | None = None,
        **rank_info: Any,
    ):
        self.world = TrainingWorld(RankInfo(**rank_info), torch.device("cpu"))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.average = AveragedModel(self.model)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100)
        self.train = self.world.loader(DATA, **(loader or {"batch_size": 4, "shuffle": True}))
        state = {"model": self.model, "optimizer": self.optimizer, "average": self.average, "schedule": self.schedule}
        self.run = self.world.run(folder, loader=self.train, **{"log_every": 1, **state, **(options or {})})

    def train_on(self, epochs: int = 3, each_step: Callable[[], object] = lambda: None) -> None:
        for _ in self.run.epochs(epochs):
            for inputs, labels in self.train:
                self.take_step(inputs, labels)
                each_step()
        self.world.close()
        self.run.close()

    def take_step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.cross_entropy(self.model(inputs), labels)
        self.run.backward(loss)
        if self.train.completes_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)
            self.run.step(loss=loss)
            self.schedule.step()

    def state(self) -> list[Any]:
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values()]
        moments = [value for entries in self.optimizer.state.values() for value in entries.values()]
        return [*(tensor.tolist() for tensor in [*tensors, *moments]), self.schedule.get_last_lr()]


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_records(folder / "metrics.jsonl") if record["kind"] == "step"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the I/O of processes")
def test_a_run_records_what_its_loop_reads_and_what_it_is_about(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    loop = Loop(tmp_path / "run", {"about": {"data": "random", "arch": "tiny"}})
    loop.train_on(1, each_step=(tmp_path / "large").read_bytes)
    first = next(read_records(tmp_path / "run/metrics.jsonl"))
    assert (first["data"], first["arch"]) == ("random", "tiny")
    steps = loop.run.step_count
    records = list(read_records(worker_file(tmp_path / "run", 0)))
    assert steps * 3_000_000 <= sum(record["read_bytes"] for record in records) < (steps + 1) * 3_000_000
    Loop(tmp_path / "none", {"io_every": 0}).train_on(1)
    assert not (tmp_path / "none/io").exists()
    with pytest.raises(ConfigError, match="unknown name 'model'; give data or arch"):
        Loop(tmp_path / "other", {"about": {"model": "tiny"}})


def test_a_run_that_is_closed_by_a_loss_is_not_complete(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    def lose() -> None:
        if loop.run.step_count == 3:
            raise End

    def train() -> None:
        try:
            loop.train_on(each_step=lose)
        finally:
            loop.run.close()

    with pytest.raises(End):
        train()
    assert [each for each in read_records(tmp_path / "metrics.jsonl") if each["kind"] == "end"] == []


def test_a_forked_child_closes_nothing_of_its_parent(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    def fork() -> None:
        if not (child := os.fork()):
            try:
                loop.run.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / ".lock").exists()

    loop.train_on(1, each_step=fork)
    assert [record["kind"] for record in read_records(tmp_path / "metrics.jsonl")].count("end") == 1


@pytest.mark.parametrize(("epochs", "count"), [({1}, 1), ({1, 2}, 0), ({2}, 0)])
def test_what_a_resumed_loop_does_not_change_again_is_named(
    epochs: set[int], count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for end in (2, 3):
        loop = Loop(tmp_path)
        for epoch in loop.run.epochs(end):
            if epoch in epochs:
                loop.model[0].requires_grad_(False)
            loop.model[1].p = 0.3
            for inputs, labels in loop.train:
                loop.take_step(inputs, labels)
            loop.model[1].p = 0.0  # as for an evaluation
        loop.run.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "does not repeat" in line]
    assert len(lines) == count
    assert all("model.0.weight.requires_grad was False" in line and "1 more" in line for line in lines)


@pytest.mark.parametrize(("steps", "words"), [(8, "epoch 2 of loader= differs"), (12, "loader.sampler.weights was")])
@pytest.mark.parametrize("stored", [True, False])
def test_order_that_a_resume_changes_is_named(
    steps: int, words: str, stored: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sampler gets weights after each epoch; the second session goes on in the second epoch, or after it."""
    for end in (steps, 99):
        sampler = WeightedRandomSampler(torch.ones(22), 22)
        loop = Loop(tmp_path, loader={"batch_size": 4, "sampler": sampler})
        with suppress(End):
            for _ in loop.run.epochs(3):
                if loop.run.step_count == end:
                    raise End
                sampler.weights = loop.run.extra.get("weights", sampler.weights)
                for inputs, labels in loop.train:
                    loop.take_step(inputs, labels)
                    if loop.run.step_count == end == 8:
                        loop.run.save()
                        raise End
                sampler.weights = torch.arange(22).double()
                if stored:
                    loop.run.extra["weights"] = sampler.weights
        loop.run.close()
    assert capfd.readouterr().err.count(words) == (not stored)


def test_what_comes_after_an_epoch_is_done_again(tmp_path: Path) -> None:
    """A run that ends in an evaluation has all of the epoch's steps, and resumes before the evaluation."""
    loop = Loop(tmp_path, {"checkpoint_steps": 6})
    evaluated: list[Any] = []
    for epoch in loop.run.epochs(2):
        for batch in loop.train:
            loop.take_step(*batch)
        loop.run.save()
        evaluated.append(epoch)
        break
    loop.run.close()
    again = Loop(tmp_path)
    for epoch in again.run.epochs(2):
        steps = sum(1 for batch in again.train for _ in [again.take_step(*batch)])
        evaluated.append((epoch, steps))
        again.run.record(top1=0.5, bleu=3.0)
    again.run.close()
    assert evaluated == [0, (0, 0), (1, 6)]
    results = [record for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "epoch"]
    assert [(each["epoch"], each["step"], each["top1"], each["metrics"]) for each in results] == [
        (1, 6, 0.5, {"bleu": 3.0}),
        (2, 12, 0.5, {"bleu": 3.0}),
    ]


def test_records_tell_rate_loss_and_learning_rate(tmp_path: Path) -> None:
    loop = Loop(tmp_path, {"log_every": 4})
    loop.run.extra["best"] = 3
    loop.train_on(1)
    records = read_records(tmp_path / "metrics.jsonl")
    run, first, last, end = (record for record in records if record["kind"] != "energy")
    assert (end["kind"], end["step"], end["exit_code"]) == ("end", 6, 0)
    assert (run["kind"], run["workers"], run["global_batch"], run["steps_per_epoch"]) == ("run", 1, 4, 6)
    assert (first["step"], last["step"], last["epoch"]) == (4, 6, 1)
    assert first["images_per_second"] == pytest.approx(4 * first["steps_per_second"])
    assert 0 <= first["data_wait"] <= 1
    assert first["lr"] > 0
    assert json.loads((tmp_path / "checkpoints/step-00000006/state.json").read_text())["states"][""] == {"best": 3}
    again = Loop(tmp_path).run
    assert again.extra == {"best": 3}
    assert isinstance(again.extra, Extra)
    again.close()


def test_a_report_shows_it_like_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path / "mine")
    for _ in loop.run.epochs(2):
        for batch in loop.train:
            loop.take_step(*batch)
        loop.run.record(loss=0.5, top1=0.25)
    loop.run.close()
    assert main(["report", str(tmp_path / "mine"), "-o", str(tmp_path / "report")]) == 0
    assert "warning" not in capsys.readouterr().err
    results = (tmp_path / "report/RESULTS.md").read_text()
    assert "| mine | 25.00 |" in results
    assert "Loss against epochs" in results


def test_tensorboard_has_what_the_loop_gives(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop = Loop(tmp_path, {"tensorboard": True})
    for _ in loop.run.epochs(1):
        for batch in loop.train:
            loop.take_step(*batch)
        loop.run.record(loss=0.5, bleu=3.0)
    loop.run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("Loss/train")] == [1, 2, 3, 4, 5, 6]
    assert [(event.step, event.value) for tag in ("Loss/val", "bleu/val") for event in events.Scalars(tag)] == [
        (6, 0.5),
        (6, 3.0),
    ]


def test_a_mean_over_tokens_is_weighted(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in loop.run.epochs(1):
        for inputs, labels in loop.train:
            loop.run.backward(F.cross_entropy(loop.model(inputs), labels), weight=7)
            loop.run.step(loss=len(inputs), tokens=torch.tensor(7.0))
    loop.run.close()
    assert _losses(tmp_path) == [4, 4, 4, 4, 4, 2]


def test_other_states_are_refused(tmp_path: Path) -> None:
    Loop(tmp_path, loader={"batch_size": 4}).train_on(1)
    with pytest.raises(CheckpointError, match=r"belongs to another job: it was made with .*states .*, not .*'more'"):
        Loop(tmp_path, options={"more": nn.Linear(2, 2)}, loader={"batch_size": 4})


def _without_weight(loop: Loop) -> None:
    for inputs, labels in loop.train:
        F.cross_entropy(loop.model(inputs), labels).backward()
        if loop.train.completes_step:
            loop.run.step()


def _without_step(loop: Loop) -> None:
    for _ in loop.train:
        pass


def _two_steps(loop: Loop) -> None:
    for batch in loop.train:
        loop.take_step(*batch)
        loop.run.step()


def _two_passes(loop: Loop) -> None:
    for _ in range(2):
        for batch in loop.train:
            loop.take_step(*batch)


def _nan(loop: Loop) -> None:
    for _ in loop.train:
        assert loop.train.weight
        loop.run.step(loss=torch.tensor(float("nan")))


def _complex(loop: Loop) -> None:
    loop.run.extra["phase"] = torch.ones(2, dtype=torch.complex128)
    loop.run.save()


def _unstorable(loop: Loop) -> None:
    loop.run.extra["of"] = {}
    loop.run.extra["of"]["seen"] = {1, 2}
    loop.run.save()


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (_without_weight, ConfigError, r"step 1 used the loss as it is.*run\.backward\(loss\)"),
        (_without_step, ConfigError, r"the epoch had batches, but no step: call run\.step\(\)"),
        (_two_steps, ConfigError, r"run\.step: called more often than the loader"),
        (_two_passes, ConfigError, r"run\.step: called more often than the loader"),
        (_nan, NonFiniteLossError, r"the mean loss is nan up to step 1\. The last good checkpoint: none yet"),
        (_complex, ConfigError, "can store torch.complex128"),
        (_unstorable, ConfigError, r"extra\.of\.seen is a set, which a checkpoint cannot store"),
    ],
)
def test_errors_name_what_the_loop_must_do(
    tmp_path: Path, body: Callable[[Loop], None], kind: type[LockstepError], message: str
) -> None:
    loop = Loop(tmp_path, loader={"batch_size": 4, "accumulate": 2 if body is _without_weight else 1})

    def train() -> None:
        for _ in loop.run.epochs(2):
            body(loop)

    with pytest.raises(kind, match=message):
        train()
    loop.run.close()


def test_the_loader_of_a_run_is_read_in_its_epochs(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train_on(1)
    with pytest.raises(DataError, match=r"read outside of `for epoch in run\.epochs"):
        next(iter(loop.train))


def test_even_shares_need_no_weight(tmp_path: Path) -> None:
    loop = Loop(tmp_path, loader={"batch_size": 4, "drop_last": True})
    for _ in loop.run.epochs(1):
        _without_weight(loop)
    loop.run.close()
    assert loop.run.step_count == 5


def test_resumed_loops_without_a_loader_draw_the_same_numbers(tmp_path: Path) -> None:
    def draw(folder: Path, ends_at: int) -> list[tuple[float, float]]:
        world, drawn = TrainingWorld(RankInfo(), torch.device("cpu")), []
        run = world.run(folder, checkpoint_steps=1)
        for _ in run.epochs(3):
            of_epoch = world.random.random()
            for _ in range(run.step_count % 5, 5):
                drawn.append((of_epoch, float(torch.rand(()))))
                run.step()
                if run.step_count == ends_at:
                    run.close()
                    return drawn
        return drawn

    whole = draw(tmp_path / "whole", 14)
    assert draw(tmp_path / "parts", 7) + draw(tmp_path / "parts", 14) == whole
    assert len(set(whole)) == 14


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"config=: a dict has no state_dict and load_state_dict"):
        world.run(tmp_path, model=nn.Linear(1, 1), config={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is the loader of an evaluation"):
        world.run(tmp_path, loader=world.loader(DATA, 4, evaluate=True), model=nn.Linear(1, 1))
    other = torch.optim.SGD(nn.Linear(1, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"^optimizer= trains 2 parameters that .* one of shape \[2, 1\]"):
        world.run(tmp_path, model=nn.Linear(1, 1), optimizer=other)


class Kept:
    """A state of the program's own."""

    def __init__(self, value: Any):
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_parameters_may_be_in_other_states(tmp_path: Path) -> None:
    world, weight = TrainingWorld(RankInfo(), torch.device("cpu")), nn.Parameter(torch.ones(2))
    world.run(tmp_path, weight=Kept(weight.detach()), optimizer=torch.optim.SGD([weight], lr=0.1)).close()


def _keep(world: World, folder: Path) -> None:
    own = TrainingWorld(world.rank_info, world.device, world.host_group)
    run = own.run(folder, mine=Kept(torch.full((2,), world.rank)), shared=Kept([1, torch.ones(2)]))
    for _ in run.epochs(2):
        run.step()
    run.close()


def test_states_that_differ_are_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_in_workers(2, _keep, tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("=")[0] for line in lines if "differs between the workers" in line] == ["lockstep: mine"]


class Around(torch.optim.SGD):
    """An optimizer that has another one, which takes its steps, as Lookahead and SAM do."""

    def __init__(self, model: nn.Module, momentum: float, stores: bool):
        super().__init__(model.parameters(), lr=0.1)
        self.inner, self.stores = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), stores

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> Any:
        return super().state_dict() | ({"inner": self.inner.state_dict()} if self.stores else {})


@pytest.mark.parametrize(("momentum", "stores", "count"), [(0.9, False, 1), (0.9, True, 0), (0.0, False, 0)])
def test_an_optimizer_that_no_checkpoint_has_is_named(
    momentum: float, stores: bool, count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world, model = TrainingWorld(RankInfo(), torch.device("cpu")), nn.Linear(2, 1)
    run = world.run(tmp_path, model=model, optimizer=(optimizer := Around(model, momentum, stores)))
    for _ in run.epochs(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.step()
    run.close()
    assert capfd.readouterr().err.count("an optimizer (SGD) takes steps, but checkpoints") == count


@pytest.mark.parametrize("is_passed", [True, False])
def test_a_loader_that_no_checkpoint_has_is_named(
    is_passed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world, model = TrainingWorld(RankInfo(), torch.device("cpu")), nn.Linear(2, 1)
    first, second, before = (world.loader(TensorDataset(torch.ones(8, 2)), 2) for _ in range(3))
    test = world.loader(TensorDataset(torch.ones(8, 2)), 2, evaluate=True)
    assert len(list(before)) == 4
    run = world.run(tmp_path, loader=first, model=model, **{"second": second} if is_passed else {})
    for _ in run.epochs(2):
        for _ in zip(first, second, strict=True):
            run.step()
        assert len(list(test)) == 4
    run.close()
    assert capfd.readouterr().err.count("a loader (TensorDataset) is read, but checkpoints") == (not is_passed)


@pytest.mark.parametrize("value", [np.float32(1), [np.int64(1)], {"a": {"b": np.bool_(True)}}])
def test_extra_refuses_numpy_scalars_when_they_are_set(value: Any) -> None:
    extra = Extra()
    for set_to in (
        lambda: extra.__setitem__("best", value),
        lambda: extra.setdefault("best", value),
        lambda: extra.update(best=value),
        lambda: extra.update([("best", value)]),
        lambda: extra.__ior__({"best": value}),
    ):
        with pytest.raises(
            ConfigError, match=r"^extra\.best(\.0|\.a\.b)? is a \w+ of NumPy \(convert it with \.item\(\)\), "
        ):
            set_to()
    extra.update(best=0.5)
    assert extra == {"best": 0.5}


def test_sums_and_means() -> None:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    assert world.sum(torch.tensor(3)) == 3
    assert world.mean(0.5, weight=10) == 0.5
    with pytest.raises(ValueError, match="the weights of all workers are 0"):
        world.mean(float("nan"), weight=0)


def test_the_elements_of_a_tensor_are_summed() -> None:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    counts = torch.tensor([[200, 1], [0, 3]], dtype=torch.uint8)
    assert world.sum(counts).tolist() == counts.tolist()
    assert [world.sum(each).dtype for each in (counts, counts.float())] == [torch.int64, torch.float64]
    assert isinstance(world.sum(torch.ones(1)), float)


@pytest.mark.parametrize("name", ["loader", "second"])
def test_batch_norm_over_workers_needs_samples_of_each(name: str, tmp_path: Path) -> None:
    world = TrainingWorld(RankInfo(rank=1, size=3), torch.device("cpu"))
    state: dict[str, Any] = {name: world.loader(DATA, global_batch=4)}  # the last step has 2 samples
    with pytest.raises(ConfigError, match=r"an epoch has 2 samples for 3 workers, but .*: pass drop_last=True,"):
        world.run(tmp_path, **state, model=nn.Sequential(GlobalBatchNorm(4)))
    for batch, drop_last, model in ((4, True, GlobalBatchNorm(4)), (6, False, GlobalBatchNorm(4)), (4, False, BATCH)):
        sharding = world.loader(DATA, global_batch=batch, drop_last=drop_last).sharding
        assert sharding is not None
        check_shares(model, sharding, "")


def test_public_names_are_what_they_say() -> None:
    assert {name for name in lockstep.__all__ if getattr(lockstep, name)} == set(lockstep.__all__)
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'conect'"):
        print(lockstep.conect)  # type: ignore[attr-defined]
