"""Runs that are interrupted by the loss of a peer and begin again in the same process, as `lockstep.survive` has it.

The loss is an exception here, and the process is the only worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep
from lockstep.cli.parse import parse_train
from lockstep.run import connect as own_world
from lockstep.run import session as run_session
from lockstep.run import training_run
from lockstep.run.checkpoints import memory_snapshots
from lockstep.run.checkpoints.kept_run import _kept as kept_runs
from lockstep.run.checkpoints.kept_run import kept_run
from lockstep.train import loop
from lockstep.train import run as train_run
from lockstep.world import generations
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

run_module = import_module("lockstep.train.run")
world_module = import_module("lockstep.world.world")


class LostError(RuntimeError):
    """The loss of a peer."""


@pytest.fixture(autouse=True)
def staying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be a worker that stays."""
    monkeypatch.setattr(generations, "stays", lambda: True)
    for module in (run_module, world_module, training_run):
        monkeypatch.setattr(module, "is_interruption", lambda error: isinstance(error, LostError))
    yield
    own_world._close_at_exit()


Main = Callable[[bool], Any]  # the argument: whether this is the first generation


def play(folder: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call `main` for two generations, the first of which is interrupted; return the result of the second."""
    for number in range(2):
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
        variables |= {"TORCHELASTIC_RESTART_COUNT": str(number), "LOCKSTEP_SNAPSHOTS": str(folder / "memory")}
        for name, value in {**variables, "LOCKSTEP_LOSS": "1.0 worker 1 was lost"}.items():
            monkeypatch.setenv(name, value)
        try:
            result = main(number == 0)
            assert number == 1, "the first generation was not interrupted"
            return result
        except LostError as error:
            assert number == 0
            for each in generations.on_loss:
                each(error)
        finally:
            own_world._close_at_exit()
    raise AssertionError


DATA = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
Body = Callable[["Loop", torch.Tensor, bool], None]


class Loop:
    """A loop of one's own over batches of 16: eight steps in two epochs, with a body to be given."""

    def __init__(self, folder: Path, net: nn.Module, optimizer: Any = torch.optim.SGD, batch: int = 16, **options: Any):
        torch.manual_seed(1)
        world = lockstep.connect("cpu")
        self.net = net
        self.model = world.prepare(net)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.train = world.loader(DATA, global_batch=batch, shuffle=True)
        states = {"model": self.model, "optimizer": self.optimizer}
        self.run = world.run(folder / "run", loader=self.train, log_every=2, **states, **options)

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.run.backward(loss)
        self.optimizer.step()
        self.run.step(loss=loss)

    def go(self, body: Body, loses: bool, epochs: int = 2) -> None:
        for _ in self.run.epochs(epochs):
            for (inputs,) in self.train:
                body(self, inputs, loses)


def both(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Path], Loop],
    body: Body,
    epochs: int = 2,
) -> tuple[Loop, Loop]:
    """Return the loop that was interrupted, where the body raises LostError if it `loses`, and one that was not."""

    def main(folder: Path, loses: bool) -> Loop:
        loop = build(folder)
        loop.go(body, loses, epochs)
        return loop

    struck = play(tmp_path / "struck", lambda loses: main(tmp_path / "struck", loses), monkeypatch)
    calm = main(tmp_path / "calm", loses=False)
    own_world._close_at_exit()
    for name, value in calm.net.state_dict().items():
        assert torch.equal(struck.net.state_dict()[name], value), name
    assert struck.run.step_count == calm.run.step_count
    return struck, calm


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] in kinds]


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def simple(loop: Loop, inputs: torch.Tensor, loses: bool) -> None:
    loss = loop.model(inputs).square().mean()
    if loses and loop.run.step_count == 5:
        raise LostError
    loop.update(loss)


class Counting(nn.Module):
    """Rebinds its buffers in a forward pass; one of them has elements that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1, 4).expand(8, 4), persistent=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.linear(self.norm(inputs))


def test_buffers_of_an_interrupted_pass_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck, _ = both(tmp_path, monkeypatch, lambda folder: Loop(folder, Counting()), simple)
    assert struck.net.seen == 8


def test_gradients_that_wait_for_an_update_belong_to_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(loop: Loop, inputs: torch.Tensor, loses: bool) -> None:
        loss = loop.model(inputs).square().mean() / 2
        if loses and loop.train.steps_done == 6:
            raise LostError
        loop.run.backward(loss)
        if loop.train.steps_done % 2:
            return
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.run.step()

    both(tmp_path, monkeypatch, lambda folder: Loop(folder, linear(), batch=8), body, epochs=1)


def test_the_last_checkpoint_is_written_after_a_loss_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    are_finite = run_session.are_finite
    loop: Loop

    def check(*arguments: Any) -> bool:
        if loses and loop.run.step_count == 8:
            raise LostError
        return are_finite(*arguments)

    monkeypatch.setattr(run_session, "are_finite", check)

    def main(first: bool) -> None:
        nonlocal loop, loses
        loop, loses = Loop(tmp_path, linear()), first
        loop.go(lambda loop, inputs, loses: simple(loop, inputs, False), first)

    loses = False
    play(tmp_path, main, monkeypatch)
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()
    assert [each["exit_code"] for each in records(tmp_path, "end")] == [0]


def test_records_after_the_restored_step_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for a snapshot, the run goes on from its last checkpoint."""
    monkeypatch.setattr(memory_snapshots.SnapshotFolder, "_lack_of_room", lambda *_: "no room")

    def body(loop: Loop, inputs: torch.Tensor, loses: bool) -> None:
        if loses and loop.run.step_count == 7:
            raise LostError
        loop.update(loop.model(inputs).square().mean())

    both(tmp_path, monkeypatch, lambda folder: Loop(folder, linear(), checkpoint_steps=4), body)
    assert [each["step"] for each in records(tmp_path / "struck", "step")] == [2, 4, 6, 8]


def test_a_run_that_is_closed_by_the_loss_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(folder: Path, loses: bool) -> Loop:
        loop = Loop(folder, linear(), checkpoint_epochs=0)
        try:
            loop.go(simple, loses)
        finally:
            loop.run.close()
        return loop

    struck = play(tmp_path / "struck", lambda loses: main(tmp_path / "struck", loses), monkeypatch)
    calm = main(tmp_path / "calm", loses=False)
    assert torch.equal(struck.net.weight, calm.net.weight)
    assert [each["repeated_steps"] for each in records(tmp_path / "struck", "generation")] == [1]
    assert len(records(tmp_path / "struck", "end")) == 1


TRAIN = ["digits", "-b", "64", "-p", "10", "--io-every", "0", "--track", "--device", "cpu", "--keep", "9"]


Lose = Callable[[int, loop.Job], bool]


def session(folder: Path, flags: list[str], lose: Lose, info: RankInfo) -> None:
    """Run `lockstep train`; `lose` says whether the loss is before a step."""
    take_step = loop.take_step

    def losing(job: loop.Job, batch: Any, position: int) -> None:
        if lose(job.progress.step, job):
            raise LostError
        take_step(job, batch, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_step", losing)
        config = parse_train([*TRAIN, *flags, "--run-dir", str(folder / "run")]).job
        train_run(config, World(info, torch.device("cpu"), None))


def train(folder: Path, flags: list[str], lose: Lose) -> None:
    """Train with a loss in the folder `struck`, and without in `calm`; compare the weights."""
    struck = RankInfo(launcher="torchrun", snapshots=folder / "memory", loss="worker 1 was lost", loss_time=1.0)
    with suppress(LostError):
        session(folder / "struck", flags, lose, struck)
    session(folder / "struck", flags, lambda step, job: False, replace(struck, restart=1))
    session(folder / "calm", flags, lambda step, job: False, replace(struck, snapshots=folder / "other"))
    weights = [load_file(folder / name / "run" / "model.safetensors") for name in ("struck", "calm")]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


SETTING = ["--epochs", "1", "--max-steps", "20", "--optimizer", "sgd", "--lr", "0.1", "--warmup-epochs", "0"]


def test_number_of_repeated_steps_may_be_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All workers were started again, so no process has seen the steps that were lost."""
    info = RankInfo(launcher="torchrun", snapshots=tmp_path / "memory", loss="worker 1 was lost", loss_time=1.0)
    with pytest.raises(LostError):
        session(tmp_path, [*SETTING, "-p", "5"], lambda now, job: now == 7, info)
    kept_runs.clear()
    session(tmp_path, [*SETTING, "-p", "5"], lambda now, job: False, replace(info, restart=1))
    assert "repeated_steps" not in records(tmp_path, "generation")[0]
    assert re.search(r"the next step was complete after [\d.]+ s; that was step 6\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "step", "repeated"),
    [
        ([*SETTING, "-p", "5"], 7, 2),
        ([*SETTING, "--snapshot-steps", "3"], 7, 1),
        ([*SETTING, "--snapshot-steps", "0", "--checkpoint-steps", "4"], 7, 3),
        # An epoch has 23 steps, after which no checkpoint is due.
        (["--epochs", "2", "-p", "23", "--checkpoint-epochs", "0"], 30, 7),
    ],
    ids=["log-every", "snapshot-steps", "checkpoint", "epoch"],
)
def test_steps_since_the_newest_state_are_repeated_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], step: int, repeated: int
) -> None:
    train(tmp_path, flags, lambda now, job: now == step)
    assert [each["repeated_steps"] for each in records(tmp_path / "struck", "generation")] == [repeated]
    assert re.search(rf"the next step was complete after [\d.]+ s; {repeated} steps? repeated", capsys.readouterr().out)
    struck, calm = (
        [
            {name: each.get(name) for name in ("kind", "step", "loss", "samples", "lr", "split")}
            for each in records(tmp_path / name, "step", "epoch")
        ]
        for name in ("struck", "calm")
    )
    assert struck == calm


def test_a_second_loss_keeps_the_record_of_the_first(tmp_path: Path) -> None:
    info = RankInfo(launcher="torchrun", snapshots=tmp_path / "memory", loss="worker 1 was lost", loss_time=1.0)
    for number in range(3):
        with suppress(LostError):
            session(tmp_path, [*SETTING, "-p", "5"], lambda step, job: step == 8, replace(info, restart=number))
    session(tmp_path, [*SETTING, "-p", "5"], lambda step, job: False, replace(info, restart=3))
    assert [each["number"] for each in records(tmp_path, "generation")] == [1, 2, 3]


def test_a_data_set_is_kept_only_until_the_run_goes_on(tmp_path: Path) -> None:
    """Another run in the folder may have another one."""
    info = RankInfo(launcher="torchrun", snapshots=tmp_path / "memory", loss="worker 1 was lost", loss_time=1.0)
    with pytest.raises(LostError):
        session(tmp_path, SETTING, lambda step, job: step == 7, info)
    kept = kept_run(tmp_path / "run")
    assert kept.data is not None
    session(tmp_path, SETTING, lambda step, job: False, replace(info, restart=1))
    assert kept.data is None


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_best_evaluation_counts_when_its_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    are_finite, evaluations = run_session.are_finite, 0
    report = loop.report_evaluation

    def count(*arguments: Any) -> None:
        nonlocal evaluations
        evaluations += 1
        report(*arguments)

    def check(*arguments: Any) -> bool:
        if evaluations == epoch:  # in the first generation, after which there is one more
            raise LostError
        return are_finite(*arguments)

    monkeypatch.setattr(loop, "report_evaluation", count)
    monkeypatch.setattr(run_session, "are_finite", check)
    flags = ["--epochs", "2", "--lr", "0.05"]

    train(tmp_path, flags, lambda step, job: False)
    written = [sorted((tmp_path / name / "run" / "checkpoints").iterdir()) for name in ("struck", "calm")]
    assert [path.resolve().name for path in written[0]] == [path.resolve().name for path in written[1]]
    assert [each["step"] for each in records(tmp_path / "struck", "epoch")] == [23, 23, 46, 46]
