"""Training goes on over a disk that is full, read-only or gone for a while, and loses no record and doubles none."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import SmallDisk
from disturbed_run import STEPS, newest_step, recorded_steps, train
from time_limits import wait_until
from worker_group import run_in_workers

from lockstep.errors import CheckpointError
from lockstep.run import stopping
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.world.world import World


def _fill(disk: SmallDisk, run: Path, step: int) -> None:
    """Fill the disk when the checkpoint of a step is written."""
    checkpoints = run / "checkpoints"
    wait_until(lambda: checkpoint_folder.newest(checkpoints) == checkpoints / f"step-{step:08d}", pause=0.002)
    _wait_for_writer()  # which removes what it replaces
    disk.fill()


def _wait_for_writer() -> None:
    """Until the checkpoint that is being written in the background, if any, is written or has failed."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join()


def test_temporarily_full_disk_costs_only_its_checkpoints(
    small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_disk.path / "run"

    def empty() -> None:
        _wait_for_writer()
        small_disk.empty()

    train(run, {17: lambda: _fill(small_disk, run, 15), 48: empty})
    assert newest_step(run) == STEPS
    assert recorded_steps(run) == list(range(1, STEPS + 1))
    assert (run / "model.safetensors").exists()
    said = capsys.readouterr()
    for step in range(20, 46, 5):
        assert f"checkpoint of step {step} was not written: needs 4." in said.out
    assert " MB, but " in said.out
    assert "the newest is step 15; training continues" in said.out
    assert said.out.count("metrics.jsonl cannot be written: No space left on device") == 1
    assert said.out.count("metrics.jsonl is writable again; no lines were lost") == 1
    assert "Traceback" not in said.err
    assert "checkpoint of step 20 was not written" in (run / "logs" / "worker-0.log").read_text()


def test_a_disk_full_at_the_end_is_an_error_after_the_results(
    small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_disk.path / "run"
    with pytest.raises(CheckpointError, match=r"training finished, but checkpoint of step 60 .*metrics.jsonl cannot"):
        train(run, {32: lambda: _fill(small_disk, run, 30)})
    printed = capsys.readouterr().out
    assert "validation images right" in printed
    # Of all evaluations after the disk was full, none has its weights there.
    assert re.search(r"best .* after step [3-6]\d; its weights were not written", printed), printed
    small_disk.empty()
    assert newest_step(run) == 30
    train(run, {}, resume="auto")
    assert recorded_steps(run) == list(range(1, STEPS + 1))
    assert newest_step(run) == STEPS


def test_permanently_full_disk_leaves_nothing_to_resume(
    small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_disk.path / "run"
    with pytest.raises(CheckpointError) as error:
        train(run, {2: small_disk.fill})
    assert str(error.value).endswith("Free disk space and start again: there is nothing to resume")
    assert str(error.value).count("Free disk space") == 1
    assert "is not a checkpoint" not in str(error.value)
    assert "resume with" not in str(error.value)
    assert "its weights were not written" in capsys.readouterr().out
    assert not (run / "model.safetensors").exists()


def test_temporarily_readonly_disk_costs_only_its_checkpoints(
    small_disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (small_disk.path / "checkpoints").mkdir()
    run.mkdir()
    (run / "checkpoints").symlink_to(small_disk.path / "checkpoints")  # the open records would keep it writable

    def switch(allowed: bool) -> Callable[[], None]:
        def change() -> None:
            _wait_for_writer()
            small_disk.allow_writing(allowed)

        return change

    train(run, {18: switch(False), 48: switch(True)})
    assert newest_step(run) == STEPS
    assert "checkpoint of step 20 was not written: Read-only file system" in capsys.readouterr().out


def test_a_run_folder_removed_while_training_is_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def remove() -> None:
        while run.exists():  # in the middle of it, the writer may put something there
            shutil.rmtree(run, ignore_errors=True)

    train(run, {33: remove}, track=())
    assert newest_step(run) == STEPS
    assert recorded_steps(run) == list(range(1, STEPS + 1))
    assert (run / "model.safetensors").exists()


def test_workers_exit_alike_if_the_stop_checkpoint_does_not_fit(
    small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "APART_SECONDS", 0.0)  # the workers agree in every step, however short
    run = small_disk.path / "run"
    errors = run_in_workers(2, _stop_on_a_full_disk, small_disk, run)
    assert errors[0] == errors[1]
    assert re.match(r"stopped by SIGTERM after step 3[34], but checkpoint of step 3\d was not written: ", errors[0])
    assert newest_step(run) == 30


def _stop_on_a_full_disk(world: World, disk: SmallDisk, run: Path) -> str:
    def fill() -> None:
        _fill(disk, run, 30)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    actions = {32: fill, 33: stop} if world.is_main else {}
    with pytest.raises(CheckpointError) as error:
        train(run, actions, world, global_batch_size=13, batch_size=None)
    return str(error.value)
