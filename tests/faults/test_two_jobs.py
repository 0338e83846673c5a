"""Two jobs in one run folder: the second is refused, or goes on where the first has finished or was cut off."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, Job, of_one_thread, run, started

from lockstep.files.folder_lock import LOCK_FILE
from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format

FLAGS = ("--device", "cpu", "--epochs", "5000", "--checkpoint-steps", "5")
TRAIN = (*LOCKSTEP, "train", "digits", *FLAGS, "--resume", "auto", "--run-dir", "run")
OTHER_PIDS = ("unshare", "--fork", "--pid", "--mount-proc")  # as on another host, pids say nothing here


def _newest_step(folder: Path) -> int:
    """Of the run's checkpoints; 0 where there is none yet."""
    newest = checkpoint_folder.newest(folder / "run" / "checkpoints")
    return checkpoint_folder.step_of(newest) if newest else 0


def _check_sound(folder: Path) -> None:
    """All checkpoints are whole, and each step was recorded once."""
    for path in checkpoint_folder.complete(folder / "run" / "checkpoints"):
        checkpoint_format.verify(path)
    steps = [record["step"] for record in read_records(folder / "run" / "metrics.jsonl") if record["kind"] == "step"]
    assert steps == sorted(set(steps))


def _worker(job: Job) -> psutil.Process:
    """The process that trains, under `unshare`."""
    (worker,) = job.wait_until(lambda: [each for each in job.descendants() if "train" in each.cmdline()])
    return worker


def _stands_still(process: psutil.Process) -> bool:
    threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
    return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)


def test_a_second_job_is_refused_and_a_later_one_goes_on(tmp_path: Path) -> None:
    env = of_one_thread()
    with started((*TRAIN, "-np", "2"), tmp_path, env) as first:
        first.wait_until(lambda: _newest_step(tmp_path))
        for workers in ("1", "2"):
            second = run((*TRAIN, "-np", workers), tmp_path, env)
            assert second.returncode == 2, second.stderr
            assert "run is in use by lockstep train, process" in second.stderr
            assert "choose another folder (--run-dir)" in second.stderr
            assert second.stderr.count("in use by") == 1
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 75, first.text
    _check_sound(tmp_path)
    step = _newest_step(tmp_path)
    third = run((*TRAIN, "-np", "2", "--max-steps", str(step + 5)), tmp_path, env)
    assert third.returncode == 0, third.stderr
    assert f"resumed after step {step} " in third.stdout
    assert not (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.long
@pytest.mark.cold
def test_interrupted_writer_finds_its_folder_taken(tmp_path: Path) -> None:
    if subprocess.run([*OTHER_PIDS, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make pid namespaces")
    env, folder = of_one_thread(), tmp_path
    with started((*OTHER_PIDS, *TRAIN), folder, env) as first:
        first.wait_until(lambda: _newest_step(folder))
        worker = _worker(first)
        refused = run(TRAIN, folder, env)
        assert refused.returncode == 2
        assert "waiting up to 60 s for its heartbeat" in refused.stderr
        worker.send_signal(signal.SIGSTOP)
        first.wait_until(lambda: _stands_still(worker))
        os.utime(folder / "run" / LOCK_FILE, (1, 1))  # for years
        second = run((*TRAIN, "--max-steps", str(_newest_step(folder) + 8)), folder, env)
        assert second.returncode == 0, second.stderr
        assert "which was silent for" in second.stderr
        worker.send_signal(signal.SIGCONT)
        first.send_signal(signal.SIGCONT)  # it stops itself with its child
        assert first.wait() == 1
        assert "run is now held by" in first.text
        assert "exits without writing to it" in first.text
    _check_sound(folder)
