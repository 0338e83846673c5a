"""Damaged and half-written checkpoints."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from disturbed_run import STEPS, newest_step, recorded_steps, train

from lockstep.errors import CheckpointError
from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format
from lockstep.run.checkpoints.checkpoint_folder import CheckpointFolder, load_model
from lockstep.run.checkpoints.snapshot import Snapshot


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("resume", ["auto", "RUN/checkpoints"])
def test_previous_checkpoint_is_used_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: str
) -> None:
    run = tmp_path / "run"
    train(run, {}, max_steps=45)
    *_, before, last = checkpoint_folder.complete(run / "checkpoints")
    _damage(last / "states.safetensors")
    with pytest.raises(CheckpointError, match=f"{last / 'states.safetensors'} is damaged"):
        train(run, {}, resume=str(last))  # named, so nothing else will do
    train(run, {}, resume=resume.replace("RUN", str(run)))
    said = capsys.readouterr().out
    assert f"{last / 'states.safetensors'} is damaged: it does not match manifest.json; resuming from {before}" in said
    assert "resumed after step 40" in said
    assert newest_step(run) == STEPS
    assert recorded_steps(run) == list(range(1, STEPS + 1))
    assert load_model(run)


NUMBERS = 400_000  # of 4 bytes, and as many of momentum: 3.2 MB
KEEP, BEST_EVERY = 2, 3
LONGEST_LIFE_SECONDS = 0.25  # after the first checkpoint; one takes 20 to 200 ms


def _snapshot(step: int) -> Snapshot:
    """All of it says which step it is of."""
    tensors = {f"part.{number}": torch.full((NUMBERS // 4,), float(step)) for number in range(4)}
    momentum = {number: {"momentum_buffer": torch.full((NUMBERS // 4,), -float(step))} for number in range(4)}
    groups = [{"lr": 0.1, "params": list(momentum)}]
    best = step - step % BEST_EVERY
    progress = {"step": step, "best_step": best}
    return Snapshot(step, tensors, {"state": momentum, "param_groups": groups}, progress, {"arch": "none"})


def _write_for_ever(folder: Path, resumed: int, best: int, pipe: int) -> None:
    """Tell by the pipe each step whose checkpoint is complete."""
    torch.set_num_threads(1)
    checkpoints = CheckpointFolder(folder, KEEP)
    checkpoints.forget_after(resumed, best)
    step = resumed
    while True:
        step += 1
        checkpoints.save(lambda step=step: _snapshot(step), is_best=step % BEST_EVERY == 0)  # type: ignore[misc]
        if step > resumed + 1:
            os.write(pipe, struct.pack("q", step - 1))  # for which this save has waited
        if step % 5 == 0:
            checkpoints.wait()
            os.write(pipe, struct.pack("q", step))


def _live(folder: Path, resumed: int, best: int, seconds: float) -> int:
    """One life; returns the last step that it has told."""
    reader, writer = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(folder, resumed, best, writer))
    child.start()
    os.close(writer)
    told = os.read(reader, 8)
    time.sleep(seconds)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    while more := os.read(reader, 1 << 16):
        told = more[-8:]
    os.close(reader)
    return int(struct.unpack("q", told)[0])


def _check(path: Path) -> Snapshot:
    """Every number of a checkpoint is that of its own step."""
    snapshot = checkpoint_format.load(path)
    assert path.resolve().name == f"step-{snapshot.step:08d}"
    kept: dict[int, dict[str, Any]] = snapshot.states["state"]
    assert all(bool((tensor == snapshot.step).all()) for tensor in snapshot.model.values())
    assert all(bool((entry["momentum_buffer"] == -snapshot.step).all()) for entry in kept.values())
    assert (len(snapshot.model), len(kept)) == (4, 4)
    return snapshot


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.long)])
def test_kill_while_writing_leaves_the_last_reported_checkpoint(tmp_path: Path, kills: int) -> None:
    folder, chance = tmp_path / "run" / "checkpoints", random.Random()
    step = best = unfinished = 0
    for _ in range(kills):
        told = _live(folder, step, best, chance.uniform(0, LONGEST_LIFE_SECONDS))
        unfinished += any(folder.glob(".partial-*-step-*"))
        found, damaged = checkpoint_folder.newest_sound(folder)
        assert found is not None
        assert not damaged
        assert found == checkpoint_folder.newest(folder)
        snapshot = _check(found)
        assert snapshot.step >= told
        assert len(checkpoint_folder.complete(folder)) <= KEEP + 2  # the best, and an old one about to be removed
        if (folder / "best").is_symlink():
            best_step = _check(folder / "best").step
            assert best_step % BEST_EVERY == 0
            assert best_step >= told - BEST_EVERY
        step, best = snapshot.step, snapshot.progress["best_step"]
    assert unfinished >= kills // 12  # as nearly all the time is spent in writing
    print(f"{kills} kills, {unfinished} in the middle of a checkpoint, {step} checkpoints")
