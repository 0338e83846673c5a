"""Commits in the host's memory: what a restarted worker finds, and what it must not use."""

from __future__ import annotations

import itertools
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lockstep.config.values import NOTICE
from lockstep.hvd import basics
from lockstep.hvd.elastic import ElasticSampler, TorchState, loop, run, state
from lockstep.hvd.elastic.state import StateHandler

Start = Callable[[int], None]


class Lost(Exception):
    """This start of the worker is over."""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def start(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Be the only worker of a job in its n-th start."""

    def begin(number: int) -> None:
        basics.shutdown()
        monkeypatch.setattr(loop, "_runs", itertools.count())
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody is asked there
        own = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(number)}
        for name, value in {**place, **own, "LOCKSTEP_SNAPSHOTS": str(memory)}.items():
            monkeypatch.setenv(name, value)
        basics.init()

    yield begin
    basics.shutdown()
    for number in NOTICE:
        signal.signal(number, signal.SIG_DFL)


def training() -> TorchState:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sampler = ElasticSampler(range(10))
    return TorchState(model, optimizer, schedule=schedule, sampler=sampler, step=0, scale=lambda value: 2 * value)


@run
def train(state: TorchState, steps: int, lost: bool) -> None:
    while state.step < steps:
        state.model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.schedule.step()
        state.sampler.record_batch(0, 1)
        state.step = state.step + 1
        state.commit()
    if lost:
        state.step = -1  # what was not committed
        raise Lost


def commit_and_die(steps: int) -> TorchState:
    state = training()
    with pytest.raises(Lost):
        train(state, steps, lost=True)
    return state


def test_a_new_start_goes_on_from_the_last_commit(start: Start, memory: Path) -> None:
    start(0)
    before = commit_and_die(3)
    (kept,) = memory.iterdir()  # the newest and no more
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    start(1)
    after, resets = training(), []
    after.register_reset_callbacks([lambda: resets.append(after.step)])
    train(after, 3, lost=False)
    assert resets == [3]
    assert after.scale(4) == 8
    assert after.sampler.processed_num == 3
    assert after.schedule.get_last_lr() == before.schedule.get_last_lr() == [0.1 / 8]
    for name, weights in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], weights)
    momenta = [
        [each["momentum_buffer"] for each in state.optimizer.state_dict()["state"].values()]
        for state in (before, after)
    ]
    assert all(map(torch.equal, *momenta))
    train(training(), 1, lost=False)  # a second function's commits are its own
    start(2)
    again = training()
    train(again, 4, lost=False)
    assert again.sampler.processed_num == 4
    assert {path.name.rsplit("-", 1)[0] for path in memory.iterdir()} == {"commit-0-4", "commit-1-1"}


def _damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"damage")


@pytest.mark.parametrize("spoil", [_damage, lambda path: path.chmod(0o620), lambda path: path.parent.chmod(0o770)])
def test_damaged_or_foreign_commit_is_not_loaded(
    start: Start, memory: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    start(0)
    commit_and_die(2)
    spoil(next(memory.iterdir()))
    start(1)
    state = training()
    train(state, 1, lost=False)
    assert state.step == 1
    assert "ignoring" in caplog.text or "only this user can write to" in caplog.text


class Counter:
    """A type that the registry knows and that has no state_dict."""


class CounterHandler(StateHandler):
    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


def test_handler_without_its_saved_state_costs_only_the_commits(
    start: Start, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state, "_registry", [(Counter, CounterHandler), *state.get_handler_registry()])
    start(0)
    own = TorchState(counter=Counter(), step=0)
    run(lambda state: [state.commit() for _ in range(2)])(own)
    assert list(memory.iterdir()) == []
    assert caplog.text.count("CounterHandler does not implement get_saved and set_saved") == 1


@pytest.mark.parametrize("number", NOTICE)
def test_asked_to_stop_a_worker_ends_with_its_state_kept(start: Start, number: int) -> None:
    start(0)

    @run
    def until_asked(state: TorchState) -> None:
        state.step = 7
        os.kill(os.getpid(), number)
        state.check_host_updates()

    with pytest.raises(SystemExit) as end:
        until_asked(training())
    assert end.value.code == 75
    start(1)
    after = training()
    train(after, 7, lost=False)
    assert after.step == 7
