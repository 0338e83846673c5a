"""lockstep train and lockstep run, before workers start."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.cli.train import describe_resume
from lockstep.config.schema import TrainConfig
from lockstep.files.folder_lock import Owner, hold_folder


def _run(name: str, step: int) -> Path:
    checkpoint = Path("runs", f"digits-digits-net-{name}", "checkpoints", f"step-{step:08d}")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    os.utime(checkpoint, (step, step))
    return checkpoint


def test_what_is_left_is_never_the_run_of_a_job_that_goes_on(here: Path) -> None:
    earlier = _run("20260101-000000", 100).parents[1]
    ours = _run("20260101-000001", 10)
    others = _run("20260101-000001-2", 20)
    lock = hold_folder(others.parents[1], Owner("lockstep train"), "")
    left = describe_resume(TrainConfig(), [earlier])
    assert left.startswith(f"the newest checkpoint is from step 10, {ours}; ")
    assert str(others) not in left
    lock.close()  # it ended, too: nothing tells whose is whose
    first, second = describe_resume(TrainConfig(), [earlier]).split("or, if that run is another job's, ")
    assert first.startswith(f"the newest checkpoint is from step 20, {others}; ")
    assert second.startswith(f"the newest checkpoint is from step 10, {ours}; ")


def test_unwritable_run_folder_is_reported_before_workers_start(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("")
    assert main(["train", "-np", "2", "--max-restarts", "1", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep train: error: run folder runs/digits-digits-net-")
    assert line.endswith(" cannot be written: Not a directory; choose another (--run-dir)")


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


def test_it_writes_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", "slurm", "--nodes", "2", "-np", "4", "--partition", "gpu", "--", "python", "x.py"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n# 2 nodes, 2 workers on each.")
    assert "#SBATCH --partition=gpu\n" in text
    assert text.endswith('exit "$code"\n')


def test_flags_after_the_double_dash_belong_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", "pbs", "--", "python", "x.py", "--nodes", "9", "--", "--time"]) == 0
    text = capsys.readouterr().out
    assert "    python x.py --nodes 9 -- --time &\n" in text
    assert "select=1:ncpus=4:mpiprocs=1:" in text


PRELOAD = "import sys; sys.argv = ['lockstep', 'train', *sys.argv[1:]]; import lockstep.cli.before_fork\n"
READ_AGAIN = """\
from lockstep.cli import parse
def refuse(*arguments, **settings): raise AssertionError("read again")
parse.read = refuse
print(parse.parse_train(sys.argv[2:]).job.batch_size)
"""


@pytest.mark.cold
def test_their_command_line_has_been_read() -> None:
    command = [sys.executable, "-c", PRELOAD + READ_AGAIN, "digits", "-b", "17"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "17\n", "")


@pytest.fixture
def import_before_fork(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that imports lockstep.cli.before_fork again, for a command."""

    def run(*words: str) -> dict[str, Any]:
        monkeypatch.delitem(sys.modules, "lockstep.cli.before_fork", raising=False)
        monkeypatch.setattr(sys, "argv", ["lockstep", *words])
        return runpy.run_module("lockstep.cli.before_fork")

    return run


def test_without_tensorboard_the_rest_is_imported(
    import_before_fork: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "parse_train" in import_before_fork("eval")


@pytest.mark.parametrize("words", [["digits", "--no-such-flag"], ["digits", "--config", "absent.yaml"], ["--help"]])
def test_a_wrong_one_is_left_to_them_to_refuse(
    words: list[str], import_before_fork: Callable[..., dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    import_before_fork("train", *words)
    assert capfd.readouterr() == ("", "")
