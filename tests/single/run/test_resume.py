"""Resumes of the trainer's runs and of those of one's own loops: what both promise, in one process."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from resumable import EPOCHS, STEPS, USERS, End, KilledError, LostError, alone, network, results, session
from torch import nn

from lockstep.errors import CheckpointError, ConfigError, NonFiniteLossError
from lockstep.files.jsonl import read_records
from lockstep.run import session as run_session
from lockstep.run.session import reached
from lockstep.run.stopping import REQUESTS
from lockstep.train.run import kept_data

EACH = pytest.mark.parametrize("user", USERS)
LAST = EPOCHS * STEPS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Require that each test puts the signal handlers back."""
    handlers = {number: signal.getsignal(number) for number in REQUESTS}
    yield
    assert {number: signal.getsignal(number) for number in REQUESTS} == handlers


def _restarted(folder: Path, number: int) -> Any:
    loss = {"loss": "worker 1 was lost", "loss_time": 1.0} if number else {}
    return alone(snapshots=folder / "memory", restart=number, **loss)


def _generations(folder: Path) -> list[dict[str, Any]]:
    return [each for each in read_records(folder / "metrics.jsonl") if each["kind"] == "generation"]


# How the first session ends, after which step, the run's options, and the step that the second one resumes from.
CASES: list[tuple[str, int, dict[str, Any], int]] = [
    ("killed", 1, {}, 0),
    ("killed", 2, {"checkpoint_steps": 1}, 1),
    ("killed", 9, {}, 6),
    ("killed", 7, {"checkpoint_epochs": 0, "checkpoint_steps": 5}, 5),
    ("killed", 5, {"batch": 8, "accumulate": 2, "checkpoint_steps": 2}, 4),
    ("stopped", 4, {}, 4),
    ("stopped", 6, {"checkpoint_epochs": 0}, 6),
    ("stopped", 9, {"log_every": 3}, 9),
    ("lost", 5, {"log_every": 2}, 4),
    ("lost", 11, {"log_every": 5}, 10),
    ("lost", 9, {"log_every": 4, "checkpoint_epochs": 0, "checkpoint_steps": 7}, 8),
    ("lost", 8, {"log_every": 6, "checkpoint_epochs": 0}, 6),
    ("lost", 8, {"snapshot_steps": 3}, 6),
    ("lost", 8, {"snapshot_steps": 0, "checkpoint_steps": 7}, 7),
    ("all lost", 5, {"log_every": 2}, 4),
]


@pytest.mark.parametrize(
    ("user", "way", "step", "options", "resumed"),
    [(user, *case) for case in CASES for user in USERS if user == "trainer" or "snapshot_steps" not in case[2]],
)
def test_interrupted_run_ends_as_an_undisturbed_one(
    user: str,
    way: str,
    step: int,
    options: dict[str, Any],
    resumed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, folder = {"keep": 1, "log_every": 1, **options}, tmp_path / "parts"
    session(alone(), user, tmp_path / "whole", **options)
    error = {"killed": KilledError, "stopped": None}.get(way, LostError)
    stop = session(_restarted(tmp_path, 0), user, folder, End(step, error), **options)
    if way == "stopped":
        written = re.escape(str(folder / f"checkpoints/step-{step:08d}"))
        assert re.match(rf"stopped by SIGTERM after step {step}( of {LAST})?, with a checkpoint, {written}; ", stop)
        last = list(read_records(folder / "metrics.jsonl"))[-1]
        assert (last["kind"], last["step"], last["reason"]) == ("stop", step, "SIGTERM")
    if way == "all lost":  # what this process keeps goes with it
        reached.clear()
    capsys.readouterr()
    is_lost = error is LostError
    session(_restarted(tmp_path, int(is_lost)), user, folder, **{**options, "resume": not is_lost})
    said = "".join(capsys.readouterr())
    found = re.search(r"resumed after step (\d+)", said)
    assert int(found[1] if found else 0) == resumed
    assert results(folder) == results(tmp_path / "whole")
    assert not list((tmp_path / "memory").glob("*/step-*"))  # a complete run needs no memory
    if is_lost:
        repeated = step - resumed if way == "lost" else None
        assert [each.get("repeated_steps") for each in _generations(folder)] == [repeated]
        again = f"that was step {resumed + 1}" if repeated is None else f"{repeated} steps? repeated"
        assert re.search(rf"the next step was complete after [\d.]+ s; {again}\n", said)


def test_each_run_of_a_program_resumes_from_its_own_snapshot(tmp_path: Path) -> None:
    for user, step in (("trainer", 5), ("loop", 9)):
        session(alone(), user, tmp_path / f"whole {user}", log_every=2)
        session(_restarted(tmp_path, 0), user, tmp_path / user, End(step, LostError), log_every=2)
    assert len(list((tmp_path / "memory").iterdir())) == 2
    for user in USERS:
        session(_restarted(tmp_path, 1), user, tmp_path / user, log_every=2)
        assert [each["repeated_steps"] for each in _generations(tmp_path / user)] == [1]
        assert results(tmp_path / user) == results(tmp_path / f"whole {user}")


@EACH
def test_several_losses_are_recorded(user: str, tmp_path: Path) -> None:
    session(alone(), user, tmp_path / "whole", log_every=2)
    for number in range(3):
        session(_restarted(tmp_path, number), user, tmp_path / "parts", End(8, LostError), log_every=2)
    session(_restarted(tmp_path, 3), user, tmp_path / "parts", log_every=2)
    assert [each["number"] for each in _generations(tmp_path / "parts")] == [1, 2, 3]
    assert results(tmp_path / "parts")["records"] == results(tmp_path / "whole")["records"]


def test_a_run_from_another_folder_keeps_its_records(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_every": 2, "checkpoint_epochs": 0}
    session(alone(), "trainer", tmp_path / "whole", **options)
    session(alone(), "trainer", tmp_path / "first", max_steps=STEPS, **options)
    options["resume"] = str(tmp_path / "first")
    session(_restarted(tmp_path, 0), "trainer", tmp_path / "second", End(9, LostError), **options)
    session(_restarted(tmp_path, 1), "trainer", tmp_path / "second", **options)
    assert results(tmp_path / "second")["records"] == results(tmp_path / "whole")["records"]


@EACH
@pytest.mark.parametrize("lost_at", [STEPS, LAST])
def test_checkpoint_is_written_after_a_loss_in_it(
    user: str, lost_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is that of an evaluation, which counts as the best when it is written."""
    are_finite, steps, loses = run_session.are_finite, list[int](), True

    def check(*arguments: Any) -> bool:
        if loses and steps and steps[-1] == lost_at:
            raise LostError
        return are_finite(*arguments)

    monkeypatch.setattr(run_session, "are_finite", check)
    with pytest.raises(LostError):
        USERS[user](_restarted(tmp_path, 0), tmp_path / "parts", steps.append, log_every=5)
    loses = False
    session(_restarted(tmp_path, 1), user, tmp_path / "parts", log_every=5)
    session(alone(), user, tmp_path / "whole", log_every=5)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def test_data_set_is_kept_only_until_the_run_goes_on(here: Path) -> None:
    """Another run in the folder may have another one."""
    from lockstep.cli.parse import parse_train
    from lockstep.train import loop
    from lockstep.train import run as train

    flags = ["digits", "--epochs", "1", "--max-steps", "2", "--track", "--device", "cpu", "--run-dir", "run"]
    config = parse_train(flags).job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_step", Mock(side_effect=LostError))
        with pytest.raises(LostError):
            train(config, _restarted(here, 0))
    assert [*kept_data] == [here / "run"]
    train(config, _restarted(here, 1))
    assert not kept_data


@EACH
def test_complete_run_takes_no_step_but_may_get_more_epochs(
    user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = USERS[user]
    train(alone(), tmp_path)
    before = results(tmp_path)
    assert train(alone(), tmp_path) == LAST
    assert results(tmp_path) == before
    has_line = "has all of its 2 epochs: choose another folder to train again" in capsys.readouterr().err
    assert has_line == (user == "loop")  # the trainer evaluates again
    written = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"contains checkpoints of an earlier run; to resume"):
        train(alone(), tmp_path, resume=False)
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == written
    assert train(alone(), tmp_path, epochs=EPOCHS + 1) == LAST + STEPS


@EACH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 5}, r"belongs to another job: it was made with .*global.batch\S* 4, not 5"),
        ({"seed": 3}, r"belongs to another job: it was made with .*seed\D* 0, not 3"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(4, 3))}, "does not fit this run"),
    ],
    ids=["batch", "seed", "network"],
)
def test_checkpoint_of_another_job_is_refused(user: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    USERS[user](alone(), tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=message):
        USERS[user](alone(), tmp_path, **change)


@EACH
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"keep": 9}, [6, 12]),
        ({"keep": 9, "checkpoint_epochs": 2}, [12]),
        ({"keep": 9, "checkpoint_epochs": 0, "checkpoint_steps": 6}, [6, 12]),
        ({"keep": 9, "checkpoint_epochs": 0, "checkpoint_steps": 5}, [5, 10, 12]),
        ({"keep": 2, "checkpoint_steps": 2, "epochs": 1}, [4, 6]),
        ({"keep": 1, "checkpoint_steps": 2}, [6, 12]),
    ],
    ids=str,
)
def test_checkpoints_are_written_when_due(user: str, options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    class Same(nn.Module):  # so that the first evaluation stays the best
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.net(images) * 0 + torch.eye(3)[0]

    USERS[user](alone(), tmp_path, model=Same(), **options)
    found = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert sorted(found) == [f"step-{step:08d}" for step in steps]


@EACH
def test_weights_that_are_not_finite_are_never_saved(user: str, tmp_path: Path) -> None:
    model = network()

    def spoil(step: int) -> None:
        if step == 4:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    message = r"weights are NaN or infinite after step 4; no checkpoint was written\. The last good checkpoint: "
    with pytest.raises(NonFiniteLossError, match=message):
        USERS[user](alone(), tmp_path, spoil, model=model, checkpoint_steps=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]
