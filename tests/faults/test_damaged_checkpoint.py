"""A run goes on from its newest sound checkpoint, and says which one is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from disturbed_run import STEPS, newest_step, recorded_steps, train

from lockstep.errors import CheckpointError
from lockstep.train.checkpoints import checkpoint_folder
from lockstep.train.checkpoints.checkpoint_folder import load_model


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
    _damage(last / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=f"{last / 'optimizer.safetensors'} is damaged"):
        train(run, {}, resume=str(last))  # named, so nothing else will do
    train(run, {}, resume=resume.replace("RUN", str(run)))
    said = capsys.readouterr().out
    assert (
        f"{last / 'optimizer.safetensors'} is damaged: it does not match manifest.json; resuming from {before}" in said
    )
    assert "resumed after step 40" in said
    assert newest_step(run) == STEPS
    assert recorded_steps(run) == list(range(1, STEPS + 1))
    assert load_model(run)


def test_where_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, {}, max_steps=10)
    paths = checkpoint_folder.complete(run / "checkpoints")
    for path in paths:
        _damage(path / "state.json")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged") as error:
        train(run, {}, resume="auto")
    assert [str(path / "state.json") in str(error.value) for path in paths] == [True] * len(paths)
