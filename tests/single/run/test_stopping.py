"""Stopping after a step: time limits, and signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.run.stopping import REQUESTS, Deadline, Stopping
from lockstep.train import fit
from lockstep.world.generations import HostsChangedError


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now

    def round_of(self, deadline: Deadline, seconds: float, between: float = 0.0) -> bool:
        """One round, and the time to the next; whether a stop was asked for at its beginning."""
        near = deadline.is_near()
        self.now += seconds
        deadline.end_round()
        self.now += between
        return near


def test_without_a_limit_none_comes_near() -> None:
    clock = Clock()
    deadline = Deadline(clock=clock)
    assert not any(clock.round_of(deadline, 1e9) for _ in range(3))


def test_the_stop_leaves_time_for_a_checkpoint_and_a_reserve() -> None:
    clock = Clock()
    deadline = Deadline(10_000, clock=clock)
    end = clock.now + 10_000
    clock.round_of(deadline, 500)  # compiles
    with deadline.writing():
        clock.now += 40
    rounds = 0
    while not clock.round_of(deadline, 3, between=7):
        rounds += 1
    asked = clock.now - 10
    # A round that asks takes 3 s and the checkpoint 40 s: 60 s and up to one more round (10 s) are left.
    assert 60 <= end - (asked + 3 + 40) < 60 + 2 * 10
    assert rounds > 900


def test_a_first_round_that_is_the_only_one_counts() -> None:
    clock = Clock()
    deadline = Deadline(1000, clock=clock)
    clock.round_of(deadline, 500)
    assert deadline.is_near()  # another two would not fit


def test_of_a_short_time_a_quarter_is_kept() -> None:
    clock = Clock()
    deadline = Deadline(20, clock=clock)
    assert not clock.round_of(deadline, 0.0, between=14.9)
    deadline = Deadline(20, clock=clock)
    clock.now += 15
    assert deadline.is_near()


def test_time_that_is_over_already_is_near() -> None:
    assert Deadline(-5).is_near()


@pytest.fixture
def earlier() -> Iterator[dict[int, object]]:
    """Handlers that were there before, and are again; none of the signals is ignored, as under nohup."""
    ignored = [number for number in REQUESTS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    handlers = {number: signal.getsignal(number) for number in REQUESTS}
    yield handlers
    assert {number: signal.getsignal(number) for number in REQUESTS} == handlers
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", REQUESTS)
def test_a_signal_is_agreed_upon_and_the_handlers_are_put_back(earlier: dict[int, object], number: int) -> None:
    stopping = Stopping()
    with stopping.listening():
        assert not stopping.answer()
        _send(number)
        assert stopping.answer()
    assert stopping.agreed == number


def test_the_first_signal_counts(earlier: dict[int, object]) -> None:
    stopping = Stopping(has_launcher=True)
    with stopping.listening():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            _send(number)
        assert stopping.answer()
    assert stopping.agreed == signal.SIGUSR1


def test_the_second_ctrl_c_interrupts_a_worker_without_launcher(
    earlier: dict[int, object], capfd: pytest.CaptureFixture[str]
) -> None:
    with Stopping().listening():
        _send(signal.SIGINT)
        assert "press Ctrl-C again to exit at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            _send(signal.SIGINT)


def test_a_signal_between_two_generations_is_for_the_next(earlier: dict[int, object]) -> None:
    with pytest.raises(HostsChangedError), Stopping(has_launcher=True).listening():
        raise HostsChangedError
    os.kill(os.getpid(), signal.SIGUSR1)
    stopping = Stopping(has_launcher=True)
    with stopping.listening():
        stopping.ask()
        assert stopping.answer()
    assert stopping.reason == "SIGUSR1"
    assert {number: signal.getsignal(number) for number in earlier} == earlier


def test_what_was_ignored_stays_ignored() -> None:
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        stopping = Stopping()
        with stopping.listening():
            _send(signal.SIGUSR1)
            assert not stopping.answer()
    finally:
        signal.signal(signal.SIGUSR1, handler)


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(40, 1, 2, 2), torch.arange(40) % 2)


def test_a_forked_child_can_be_terminated() -> None:
    """Also before its first instruction, as when a pool is closed at once."""
    with Stopping(has_launcher=True).listening():
        for _ in range(10):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join(30)
            assert child.exitcode == -signal.SIGTERM


def test_fit_works_in_another_thread(tmp_path: Path) -> None:
    results = []

    def work() -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        results.append(fit(net, _data(), _data(), epochs=1, batch_size=4, run_dir=tmp_path, track=()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].steps == 10
