"""What loops of one's own do: each, interrupted after some step and resumed, ends with the same bits."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, get_worker_info

import lockstep
from lockstep.errors import ConfigError, StoppedError
from lockstep.files.jsonl import read_records

EPOCHS, STEPS = 3, 6  # in each epoch


class Interrupted(Exception):
    pass


class Points(Dataset[Any]):
    label_offset = 0

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4) + random.random() + np.random.rand(), (index + self.label_offset) % 3


class Session:
    """One session of a program, interrupted after the optimizer's step of this number."""

    def __init__(self, folder: Path, after: int, stops: bool, **options: Any):
        self.world = lockstep.connect("cpu")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.model = self.world.prepare(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = AveragedModel(self.model)
        self.train = self.world.loader(Points(), 4, shuffle=True, **options)
        self.second = self.world.loader(Points(), 3, shuffle=True, seed=1)
        self.after, self.stops, self.calls, self.folder = after, stops, 0, folder
        names = ("model", "optimizer", "scheduler", "average", "second")
        states = {name: getattr(self, name) for name in names}
        self.run = self.world.run(folder, loader=self.train, checkpoint_steps=2, log_every=4, **states)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        self.run.backward(loss)
        self.optimizer.step()
        self.average.update_parameters(self.model)
        self.scheduler.step(loss.item())
        self.run.step(loss=loss)
        self.calls += 1
        if self.calls == self.after:
            if not self.stops:
                raise Interrupted
            os.kill(os.getpid(), signal.SIGTERM)


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


def _weights(loop: Loop, folder: Path, after: int = 0, stops: bool = False, **options: Any) -> dict[str, Any]:
    own = None
    try:
        own = Session(folder, after, stops, **options)
        loop(own)
        drawn = torch.tensor(own.run.extra.get("drawn", own.run.extra.get("noise", 0.0)), dtype=torch.float64)
        average = {f"average {name}": x for name, x in own.average.state_dict().items()}
        return {**own.model.state_dict(), **average, "drawn": drawn}
    finally:
        if own is not None:
            own.world.close()


def _check(loop: Loop, folder: Path, **options: Any) -> None:
    expected = _weights(loop, folder / "undisturbed", **options)
    for after, stops in ((3, True), (7, False)):
        resumed = folder / f"after {after}"
        with pytest.raises((Interrupted, StoppedError)):
            _weights(loop, resumed, after, stops, **options)
        weights = _weights(loop, resumed, **options)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), after
        assert _records(resumed) == _records(folder / "undisturbed")


def _records(folder: Path) -> list[Any]:
    records = read_records(folder / "metrics.jsonl")
    return [(each["kind"], each["step"], each["loss"]) for each in records if each["kind"] in ("step", "epoch")]


@pytest.mark.parametrize("loop", LOOPS)
def test_resumed_loops_end_with_the_same_bits(loop: Loop, tmp_path: Path) -> None:
    _check(loop, tmp_path)


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

    _weights(drawing, tmp_path, accumulate=accumulate)
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
            if own.stops:
                raise Interrupted

    with pytest.raises(Interrupted):
        _weights(drawing, tmp_path, stops=True)
    _weights(drawing, tmp_path)
    assert drawn[0] == drawn[1]


def _open(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.label_offset = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("keeps", [True, False])
def test_loader_processes_change_nothing(keeps: bool, tmp_path: Path) -> None:
    """`_open` sets the data set of the process, as functions do that open files."""
    weights = _weights(plainly, tmp_path / "processes", num_workers=1, persistent_workers=keeps)
    plain = _weights(plainly, tmp_path / "plain")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    other = _weights(plainly, tmp_path / "opened", num_workers=1, persistent_workers=keeps, worker_init_fn=_open)
    assert not torch.equal(other["0.weight"], plain["0.weight"])


def test_a_signal_to_all_processes_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """Slurm signals the loader processes, too."""

    def with_signal(own: Session) -> None:
        for _ in own.run.epochs(EPOCHS):
            for batch in own.train:
                own.step(*batch)
                if own.calls == 3:
                    for process in own.train._processes._processes:
                        os.kill(process.pid, signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="after step"):
        _weights(with_signal, tmp_path, num_workers=1, prefetch_factor=1)


def test_saving_before_a_step_is_counted_is_refused(tmp_path: Path) -> None:
    def too_early(own: Session) -> None:
        for _ in own.run.epochs(1):
            for x, y in own.train:
                own.run.backward(F.cross_entropy(own.model(x), y))
                own.optimizer.step()
                own.run.save()

    with pytest.raises(ConfigError, match=r"between optimizer.step\(\) and run.step\(\)"):
        _weights(too_early, tmp_path)


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
        _weights(ahead, tmp_path)


def test_values_that_cannot_be_read_again_are_refused(tmp_path: Path) -> None:
    def with_generator(own: Session) -> None:
        own.run.extra["generator"] = np.random.default_rng(0).bit_generator.state
        plainly(own)

    with pytest.raises(ConfigError, match=r"extra.generator.state.state is an integer of more than 64 bits"):
        _weights(with_generator, tmp_path)


def test_samples_of_any_type_are_compared(tmp_path: Path) -> None:
    class Named(Points):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.randn(2), "name": np.array(["a", "b"]), "sparse": torch.eye(2).to_sparse()}

    with lockstep.connect("cpu") as world:
        batches = list(world.loader(Named(), 4, collate_fn=lambda samples: samples))
    assert len(batches) == STEPS


def test_loader_processes_end_with_the_run(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    own = Session(tmp_path, 0, False, num_workers=1, persistent_workers=True)
    try:
        plainly(own)
        loaders = set(multiprocessing.active_children()) - others
    finally:
        own.world.close()
    assert loaders
    assert not any(loader.is_alive() for loader in loaders)
