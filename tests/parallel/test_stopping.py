"""A signal to one worker stops all of them after the same step, and the resumed run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import NETS, final_weights, small_digits
from torch import nn
from worker_group import on_workers, run_in_workers

from lockstep.errors import StoppedError
from lockstep.files.jsonl import read_records
from lockstep.run import stopping
from lockstep.run.stopping import build_stopping
from lockstep.seeding import seed_all
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

EVERY = 3
SETTINGS = {"epochs": 2, "global_batch_size": 60, "log_every": EVERY, "lr": 0.05, "lr_scaling": "none", "track": ()}
TRAIN, VAL = 260, 50  # epochs of 5 steps
STEPS = 10


@pytest.fixture(autouse=True)
def in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the workers agree in every step, however short, so that a test knows in which one they stop."""
    monkeypatch.setattr(stopping, "APART_SECONDS", 0.0)


class SimulatedClock:
    """A clock for the time limit that advances in forward passes only, however busy this machine is."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


clock = SimulatedClock()


class Sender(nn.Module):
    """A network that sends its own process signals at given forward passes, counted apart for training and not.

    A pass takes `slow` simulated seconds.
    """

    def __init__(self, net: nn.Module, training: bool, moments: dict[int, tuple[int, ...]], slow: float):
        super().__init__()
        self.net, self._training, self._moments, self._passes, self._slow = net, training, moments, 0, slow

    def forward(self, images: Any) -> Any:
        clock.seconds += self._slow
        if self.training == self._training:
            self._passes += 1
            for number in self._moments.get(self._passes, ()):
                os.kill(os.getpid(), number)
        return self.net(images)


def _train(
    world: World,
    path: Path,
    target: int = -1,
    moments: dict[int, tuple[int, ...]] | None = None,
    training: bool = True,
    slow: float = 0.0,
    variables: dict[str, str] | None = None,
    **settings: Any,
) -> tuple[str, int]:
    """Train; returns the message of the stop, and its exit code."""
    seed_all(0, 0, 0)
    sends = moments if moments and world.rank == target else {}
    os.environ.update(variables or {})
    config = configure(**{**SETTINGS, "run_dir": path, **settings})
    before = signal.getsignal(signal.SIGTERM)
    stopping.Deadline = partial(stopping.Deadline, clock=clock)  # type: ignore[assignment, misc]
    try:
        run_with(config, world, small_digits(TRAIN, VAL), Sender(NETS["lively"](), training, sends, slow))
    except StoppedError as stop:
        return str(stop), stop.exit_code
    finally:
        assert signal.getsignal(signal.SIGTERM) is before
    return "", 0


def _run(size: int, path: Path, **settings: Any) -> tuple[str, int]:
    """The outcome of all workers, which must be the same."""
    outcomes = run_in_workers(size, _call, path, settings)
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


def _call(world: World, path: Path, settings: dict[str, Any]) -> tuple[str, int]:
    return _train(world, path, **settings)


def _epochs(path: Path, kind: str = "epoch") -> list[dict[str, Any]]:
    """The records of epochs, or of another kind, without what depends on the clock."""
    clocks = (
        "busy_cores",
        "phase_spread",
        "time_seconds",
        "unix_time",
        "images_per_second",
        "epoch_seconds",
        "data_wait",
        "phase_seconds",
    )
    records = [record for record in read_records(path / "metrics.jsonl") if record["kind"] == kind]
    return [{key: value for key, value in record.items() if key not in clocks} for record in records]


def _checkpoints(path: Path) -> list[str]:
    return sorted(found.name for found in (path / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing stopped, by their number of workers."""
    paths = {size: tmp_path_factory.mktemp("whole") / str(size) for size in (1, 2)}
    for size, path in paths.items():
        assert _run(size, path) == ("", 0)
    return paths


@pytest.mark.parametrize(("size", "moment"), [(1, 1), (2, 1)])
def test_stopped_in_an_evaluation_repeats_it_after_the_resume(
    tmp_path: Path, whole: dict[int, Path], size: int, moment: int
) -> None:
    stop = {"target": size - 1, "moments": {moment: (signal.SIGUSR1,)}, "training": False}
    message, code = _run(size, tmp_path, **stop)
    assert code == 75
    step = 5 if size == 1 else 6  # with one batch a worker, the workers agree in the next step
    assert message.startswith(f"stopped by SIGUSR1 after step {step} ")
    assert _run(size, tmp_path, resume="auto") == ("", 0)
    assert final_weights(tmp_path) == final_weights(whole[size])
    assert _epochs(tmp_path) == _epochs(whole[size])


def test_long_evaluation_is_cut_short_with_unequal_batch_numbers(tmp_path: Path) -> None:
    small = {"global_batch_size": 26, "max_steps": 15, "accumulate": 2}  # 25 samples a worker, in batches of 7
    assert _run(2, tmp_path / "whole", **small) == ("", 0)
    stop = {"target": 0, "moments": {2: (signal.SIGTERM,)}, "training": False}
    message, code = _run(2, tmp_path / "cut", **small, **stop)
    assert code == 75
    assert message.startswith("stopped by SIGTERM after step 10 of 15")
    assert [record["split"] for record in _epochs(tmp_path / "cut")] == ["train"]
    assert _run(2, tmp_path / "cut", resume="auto", **small) == ("", 0)
    assert final_weights(tmp_path / "cut") == final_weights(tmp_path / "whole")
    assert _epochs(tmp_path / "cut") == _epochs(tmp_path / "whole")


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_in_the_last_step_or_after_it_lets_the_run_end(
    tmp_path: Path, whole: dict[int, Path], size: int
) -> None:
    for name, training, moment in (("step", True, STEPS), ("evaluation", False, 2)):
        path = tmp_path / name
        stop = {"target": 0, "training": training, "moments": {moment: (signal.SIGTERM,)}}
        assert _run(size, path, **stop) == ("", 0)
        assert final_weights(path) == final_weights(whole[size])


def test_time_limit_stops_workers_and_the_resume_is_identical(tmp_path: Path, whole: dict[int, Path]) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(int(time.time()) + 1000)}
    message, code = _run(2, tmp_path, slow=150.0, variables=job)  # all of it would take 1,800 s
    assert code == 75
    last = list(read_records(tmp_path / "metrics.jsonl"))[-1]
    assert 0 < last["step"] < 6  # with a reserve of 60 s for the checkpoint, after one evaluation at most
    assert (last["kind"], last["reason"]) == ("stop", "the time limit")
    assert message.startswith(f"stopped by the time limit after step {last['step']} of {STEPS}, with a checkpoint, ")
    assert _checkpoints(tmp_path)[-1] == f"step-{last['step']:08d}"
    assert all("left (SLURM_JOB_END_TIME)" in log.read_text() for log in (tmp_path / "logs").iterdir())
    assert last["step"] % EVERY  # in the middle of a record's steps
    assert _run(2, tmp_path, resume="auto", time_limit="1-0") == ("", 0)
    assert final_weights(tmp_path) == final_weights(whole[2])
    for kind in ("epoch", "step"):
        assert _epochs(tmp_path, kind) == _epochs(whole[2], kind)


def test_further_signals_change_nothing(tmp_path: Path) -> None:
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    message, code = _run(2, tmp_path, target=1, moments={5: numbers, 6: numbers}, accumulate=2)
    assert code == 75
    assert message.startswith("stopped by SIGUSR1 after step 4 ")  # two passes a step
    assert _checkpoints(tmp_path)[-1] == "step-00000004"


@on_workers(2)
def test_a_question_without_an_answer_does_not_disturb_the_next(world: World) -> None:
    """As when training goes back in the middle of a step."""
    workers = build_stopping(world)
    with workers.listening():
        workers.ask()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        workers.ask()
        assert workers.answer()
        assert workers.agreed == signal.SIGTERM


def test_workers_with_short_steps_stop_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "APART_SECONDS", 0.05)
    (stopped, asked), other = run_in_workers(2, _stop_in_short_steps)
    assert other == (stopped, asked)
    assert 50 <= stopped <= 50 + 32
    assert 3 <= asked < stopped


def _stop_in_short_steps(world: World) -> tuple[int, int]:
    """The number of the round that stops, and in how many of them the workers asked each other."""
    workers, asked = build_stopping(world), 0
    with workers.listening():
        for number in range(200):
            if world.rank == 1 and number == 50:
                os.kill(os.getpid(), signal.SIGTERM)
            workers.ask()
            asked += workers._work is not None  # type: ignore[attr-defined]
            time.sleep(0.001)
            if workers.answer():
                return number, asked
    raise AssertionError("nobody stopped")
