"""Loops of one's own: each, killed and stopped at any place of its body and resumed, ends as an undisturbed one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from resumable import KilledError, results
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, get_worker_info

import lockstep
from lockstep.errors import ConfigError, StoppedError

EPOCHS, STEPS = 3, 6  # in each epoch


class Points(Dataset[Any]):
    label_offset = 0

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4) + random.random() + np.random.rand(), (index + self.label_offset) % 3


class Session:
    """One session of a program, which ends when it comes to a place for the given time."""

    def __init__(
        self,
        folder: Path,
        end: tuple[str, int] | None = None,
        stops: bool = False,
        loader: dict[str, Any] | None = None,
        **options: Any,
    ):
        self.world = lockstep.connect("cpu")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.model = self.world.prepare(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = AveragedModel(self.model)
        self.train = self.world.loader(Points(), 4, shuffle=True, **(loader or {}))
        self.second = self.world.loader(Points(), 3, shuffle=True, seed=1)
        names = ("model", "optimizer", "scheduler", "average", "second")
        states = {name: getattr(self, name) for name in names}
        self.run = self.world.run(
            folder, loader=self.train, **{"checkpoint_steps": 2, "log_every": 4, **options}, **states
        )
        self._end, self._times, self.stops = end, 0, stops

    def at(self, place: str) -> None:
        self._times += self._end is not None and place == self._end[0]
        if self._end == (place, self._times):
            self._end = None
            if not self.stops:
                raise KilledError
            os.kill(os.getpid(), signal.SIGTERM)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.run.backward(loss)
        self.at("in a step")
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.scheduler.step(loss.item())
        self.run.step(loss=loss)
        self.count("steps")
        self.at("after a step")

    def count(self, name: str) -> None:
        self.run.extra[name] = self.run.extra.get(name, 0) + 1


Loop = Callable[[Session], None]


def counting(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for number, batch in enumerate(own.train, own.train.steps_done):
            own.step(*batch)
            own.optimizer.param_groups[0]["lr"] = 0.05 / (1 + number / len(own.train))


def part_of_each_epoch(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for batch in itertools.islice(own.train, 4 - own.train.steps_done):
            own.step(*batch)


def leaving_epochs_early(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for batch in own.train:
            own.step(*batch)
            if own.run.step_count % 5 == 0:
                break


def up_to_a_step(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for batch in own.train:
            if own.run.step_count >= 2 * STEPS - 1:
                break
            own.step(*batch)


def without_some_batches(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for x, y in own.train:
            if own.train.steps_done in (3, STEPS) or float(x.sum()) < 4:
                continue
            own.step(x, y)


def stopping_early(own: Session) -> None:
    for epoch in own.run.epochs(100):
        for batch in own.train:
            own.step(*batch)
        if epoch == EPOCHS - 1:
            break


def evaluating_between(own: Session) -> None:
    values = own.world.loader(Points(), 5, evaluate=True)
    for _ in own.run.epochs(EPOCHS):
        for number, batch in enumerate(own.train, own.train.steps_done):
            own.model.train()
            own.step(*batch)
            if number % 2:
                own.model.eval()
                with torch.no_grad():
                    losses = [float(F.cross_entropy(own.model(x), y)) + torch.rand(()) for x, y in values]
                own.run.record(loss=float(sum(losses)))
                own.run.save(best=number == 3)


def with_two_loaders(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for (x, y), (other, other_y) in zip(own.train, own.second, strict=False):
            own.step(torch.cat([x, other]), torch.cat([y, other_y]))


def with_values(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for batch in own.train:
            values = own.run.extra.setdefault("values", {3: torch.zeros(2), "best": (float("inf"), None)})
            values[3] += 1
            own.step(*batch)
    assert own.run.extra["values"][3].tolist() == [EPOCHS * STEPS] * 2


def drawing_before_the_steps(own: Session) -> None:
    for epoch in own.run.epochs(EPOCHS):
        scale = random.random() + float(torch.rand(())) + own.world.random.random()
        others, _ = next(iter(own.world.loader(Points(), 4, shuffle=True)))
        for x, y in own.train:
            own.step(x * scale + others, y)
        own.run.extra["drawn"] = [epoch, random.random()]


def drawing_in_each_batch(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for number, (x, y) in enumerate(own.train, own.train.steps_done):
            noise = torch.randn(4) * own.world.random.random()
            own.run.extra["noise"] = own.run.extra.get("noise", 0.0) + float(noise.sum())
            if number % 2:  # as the batch of a generator, after one of its critic alone
                own.step(x + noise, y)


def plainly(own: Session) -> None:
    for _ in own.run.epochs(EPOCHS):
        for batch in own.train:
            own.step(*batch)


LOOPS: list[Loop] = [
    counting,
    part_of_each_epoch,
    leaving_epochs_early,
    up_to_a_step,
    without_some_batches,
    stopping_early,
    evaluating_between,
    with_two_loaders,
    with_values,
    drawing_before_the_steps,
    drawing_in_each_batch,
]


def evaluating(own: Session) -> None:
    """Save where users do: between two steps, directly after the last one, and as the best one after an evaluation."""
    for epoch in own.run.epochs(EPOCHS):
        own.at("before the inner loop")
        for number, batch in enumerate(own.train, own.train.steps_done):
            own.step(*batch)
            if number == 1:
                own.run.save(best=True)
                own.at("after a save between steps")
        own.at("after the last step")
        own.run.save()
        own.at("after a save")
        own.optimizer.param_groups[0]["momentum"] *= 0.9
        own.count("epochs")
        own.at("after a change")
        own.run.record(top1=epoch / EPOCHS)
        own.at("after the record")
        own.run.save(best=epoch < 2)
        own.at("after the best save")
        own.count("ends")
        own.at("at the end")


PLACES = (
    *("before the inner loop", "in a step", "after a step", "after a save between steps", "after the last step"),
    *("after a save", "after a change", "after the record", "after the best save", "at the end"),
)


def by_hand(zero: str) -> Loop:
    """Accumulate four batches a step, so that epochs end within one; `zero`: where gradients are set to zero."""

    def body(own: Session) -> None:
        own.run.extra.setdefault("batches", 0)
        for _ in own.run.epochs(EPOCHS):
            for x, y in own.train:
                number = own.run.extra["batches"]
                if zero == "before" and number % 4 == 0:
                    own.optimizer.zero_grad(set_to_none=False)
                own.run.extra["batches"] += 1
                (F.cross_entropy(own.model(x), y) / 4).backward()
                if number % 4 == 3:
                    own.optimizer.step()
                    if zero != "before":
                        own.optimizer.zero_grad(set_to_none=zero == "none")
                    own.run.step()
                own.at("after a batch")

    return body


def _play(loop: Loop, folder: Path, *end: Any, **options: Any) -> dict[str, Any]:
    """Run a session; return its tensors and numbers in the end."""
    own = None
    try:
        own = Session(folder, *end, **options)
        loop(own)
        average = {f"average {name}": x for name, x in own.average.state_dict().items()}
        return {**own.model.state_dict(), **average, **own.run.extra}
    finally:
        if own is not None:
            own.world.close()


def _check(loop: Loop, folder: Path, end: tuple[str, int], **options: Any) -> None:
    """Kill the program, stop it at the same place after it was resumed, and resume it again."""
    options = {"keep": 1, **options}
    expected = _play(loop, folder / "undisturbed", **options)
    with pytest.raises(KilledError):
        _play(loop, folder / "disturbed", end, **options)
    with suppress(StoppedError):  # at the last place, the program may end first
        _play(loop, folder / "disturbed", end, True, **options)
    found = _play(loop, folder / "disturbed", **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert results(folder / "disturbed") == results(folder / "undisturbed")


def _pairs(firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """All pairs, of which the usual run has one for each of the longer sequence; the rest is for the long one."""
    count = min(len(firsts), len(seconds))
    return [
        pytest.param(first, second, marks=[] if (one + other) % count == 0 else [pytest.mark.long])
        for one, first in enumerate(firsts)
        for other, second in enumerate(seconds)
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoint_steps": 1},
    {"checkpoint_steps": 3, "checkpoint_epochs": 0},
    {"checkpoint_epochs": 2},
]


@pytest.mark.parametrize(("place", "options"), _pairs(PLACES, OPTIONS))
def test_each_place_of_the_body_is_passed_once(place: str, options: dict[str, Any], tmp_path: Path) -> None:
    each_epoch = STEPS if place in ("in a step", "after a step") else 1
    _check(evaluating, tmp_path, (place, 1 + each_epoch), **{"log_every": 1, "checkpoint_steps": 0, **options})


@pytest.mark.parametrize(("zero", "batch"), _pairs(["none", "zeros", "before"], range(1, 10)))
def test_gradients_of_batches_before_a_stop_are_used(zero: str, batch: int, tmp_path: Path) -> None:
    _check(by_hand(zero), tmp_path, ("after a batch", batch), checkpoint_steps=1, log_every=1)


@pytest.mark.parametrize(("loop", "step"), _pairs(LOOPS, [3, 7]))
def test_resumed_loops_end_with_the_same_bits(loop: Loop, step: int, tmp_path: Path) -> None:
    _check(loop, tmp_path, ("after a step", step))


def test_second_loader_is_left_where_it_was_before_a_stop(tmp_path: Path) -> None:
    expected = _play(with_two_loaders, tmp_path / "undisturbed")
    with pytest.raises(StoppedError):  # at the end of the first loader's pass
        _play(with_two_loaders, tmp_path / "disturbed", ("after a step", STEPS), True)
    torch.testing.assert_close(_play(with_two_loaders, tmp_path / "disturbed"), expected, rtol=0, atol=0)


def test_a_save_is_written_if_the_body_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def early(own: Session) -> None:
        for _ in own.run.epochs(EPOCHS):
            for batch in own.train:
                own.step(*batch)
            own.run.save(best=True)
            break
        own.at("after the loop")
        own.run.close()

    with pytest.raises(KilledError):
        _play(early, tmp_path, ("after the loop", 1), checkpoint_steps=0)
    assert "run.save: not written, since its epoch was left: call run.close()" in capsys.readouterr().err
    assert not (tmp_path / "checkpoints/best").exists()
    _play(early, tmp_path)
    assert (tmp_path / "checkpoints/best").resolve().name == "step-00000006"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_batch_draws_other_numbers(accumulate: int, tmp_path: Path) -> None:
    drawn = []

    def drawing(own: Session) -> None:
        for _ in own.run.epochs(EPOCHS):
            for number, _ in enumerate(own.train):
                drawn.append((float(torch.rand(())), random.random(), np.random.rand(), own.world.random.random()))
                own.run.backward(next(own.model.parameters()).sum())
                if number % 3 == 2:
                    own.run.step()

    _play(drawing, tmp_path, loader={"accumulate": accumulate})
    assert len(drawn) == EPOCHS * STEPS
    of_steps = drawn[::accumulate]
    assert all(len(set(numbers)) == len(drawn) for numbers in list(zip(*drawn, strict=True))[:3])
    assert len({agreed for *_, agreed in of_steps}) == len(of_steps)


def test_draws_after_the_steps_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    drawn = list[float]()

    def drawing(own: Session) -> None:
        for _ in own.run.epochs(1):
            for batch in own.train:
                own.step(*batch)
            own.run.save()
            drawn.append(float(torch.rand(())) + random.random() + own.world.random.random())
            own.at("after the draws")

    with pytest.raises(KilledError):
        _play(drawing, tmp_path, ("after the draws", 1))
    _play(drawing, tmp_path)
    assert drawn[0] == drawn[1]


def test_draws_after_a_complete_run_are_those_after_the_steps(tmp_path: Path) -> None:
    drawn = list[float]()

    def drawing(own: Session) -> None:
        plainly(own)
        drawn.append(float(torch.rand(())) + random.random())

    for _ in range(2):
        _play(drawing, tmp_path)
    assert drawn[0] == drawn[1]


def _open(worker: int) -> None:
    info = get_worker_info()
    info.dataset.label_offset = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("keeps", [True, False])
def test_loader_processes_change_nothing(keeps: bool, tmp_path: Path) -> None:
    """`_open` sets the data set of the process, as functions do that open files."""
    options = {"num_workers": 1, "persistent_workers": keeps}
    weights, plain = (_play(plainly, tmp_path / str(len(each)), loader=each) for each in (options, {}))
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    other = _play(plainly, tmp_path / "opened", loader={**options, "worker_init_fn": _open})
    assert not torch.equal(other["0.weight"], plain["0.weight"])


def test_a_signal_to_all_processes_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """Slurm signals the loader processes, too."""

    def with_signal(own: Session) -> None:
        for _ in own.run.epochs(EPOCHS):
            for batch in own.train:
                own.step(*batch)
                if own.run.step_count == 3:
                    for process in own.train._processes._processes:
                        os.kill(process.pid, signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="after step"):
        _play(with_signal, tmp_path, loader={"num_workers": 1, "prefetch_factor": 1})


def test_saving_before_a_step_is_counted_is_refused(tmp_path: Path) -> None:
    def too_early(own: Session) -> None:
        for _ in own.run.epochs(1):
            for x, y in own.train:
                own.run.backward(F.cross_entropy(own.model(x), y))
                own.optimizer.step()
                own.run.save()

    with pytest.raises(ConfigError, match=r"between optimizer.step\(\) and run.step\(\)"):
        _play(too_early, tmp_path)


def test_reading_ahead_is_refused(tmp_path: Path) -> None:
    def ahead(own: Session) -> None:
        for _ in own.run.epochs(1):
            batches = iter(own.train)
            batch = next(batches)
            while batch is not None:
                following = next(batches, None)
                own.step(*batch)
                batch = following

    with pytest.raises(ConfigError, match=r"do not read the next batch before run.step"):
        _play(ahead, tmp_path)


def test_values_that_cannot_be_read_again_are_refused(tmp_path: Path) -> None:
    def with_generator(own: Session) -> None:
        own.run.extra["generator"] = np.random.default_rng(0).bit_generator.state
        plainly(own)

    with pytest.raises(ConfigError, match=r"extra.generator.state.state is an integer of more than 64 bits"):
        _play(with_generator, tmp_path)


def test_samples_of_any_type_are_compared(tmp_path: Path) -> None:
    class Named(Points):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.randn(2), "name": np.array(["a", "b"]), "sparse": torch.eye(2).to_sparse()}

    with lockstep.connect("cpu") as world:
        batches = list(world.loader(Named(), 4, collate_fn=lambda samples: samples))
    assert len(batches) == STEPS


def test_loader_processes_end_with_the_run(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    own = Session(tmp_path, loader={"num_workers": 1, "persistent_workers": True})
    try:
        plainly(own)
        loaders = set(multiprocessing.active_children()) - others
    finally:
        own.world.close()
    assert loaders
    assert not any(loader.is_alive() for loader in loaders)
