"""`lockstep train`: what the process that starts the workers says itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.train import _describe_resume
from lockstep.config.schema import TrainConfig
from lockstep.files.folder_lock import Owner, hold_folder


def _run(name: str, step: int) -> Path:
    checkpoint = Path("runs", f"digits-digits-net-{name}", "checkpoints", f"step-{step:08d}")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    os.utime(checkpoint, (step, step))
    return checkpoint


def test_what_is_left_is_never_the_run_of_a_job_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = _run("20260101-000000", 100).parents[1]
    ours = _run("20260101-000001", 10)
    others = _run("20260101-000001-2", 20)
    lock = hold_folder(others.parents[1], Owner("lockstep train"), "")
    left = _describe_resume(TrainConfig(), [earlier])
    assert left.startswith(f"the newest checkpoint is from step 10, {ours}; ")
    assert str(others) not in left
    lock.close()  # it ended, too: nothing tells whose is whose
    first, second = _describe_resume(TrainConfig(), [earlier]).split("or, if that run is another job's, ")
    assert first.startswith(f"the newest checkpoint is from step 20, {others}; ")
    assert second.startswith(f"the newest checkpoint is from step 10, {ours}; ")


def test_unwritable_run_folder_is_reported_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("")
    assert main(["train", "-np", "2", "--max-restarts", "1", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep train: error: run folder runs/digits-digits-net-")
    assert line.endswith(" cannot be written: Not a directory; choose another with --run-dir")


@pytest.mark.parametrize(
    ("run", "why"), [("", "--run-dir '': must be a path"), ("/", "is the root"), ("/usr/..", "is the root")]
)
def test_run_folder_that_would_be_scattered_is_refused(capsys: pytest.CaptureFixture[str], run: str, why: str) -> None:
    assert main(["train", "--run-dir", run, "--max-steps", "1"]) == 2
    assert why in capsys.readouterr().err


def test_a_current_folder_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["train", "-np", "2"]) == 1
    said = capsys.readouterr().err
    assert said == "lockstep train: error: the current folder was removed; change to another one\n"
