"""What `horovod.run` makes of the files that its workers have left."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lockstep.launch.controller.run_function import PROCESS_FAILED, WORKER_FAILED, results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One of two workers that failed, the other earlier in time."""
    (tmp_path / "error.1").write_bytes(pickle.dumps((200, 0, "the later error")))
    (tmp_path / "error.2").write_bytes(pickle.dumps((100, 1, "the earlier error")))
    return tmp_path


def test_a_job_fails_by_its_first_error(folder: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        results(folder, WORKER_FAILED, "worker 1 failed")
    assert str(raised.value) == f"{PROCESS_FAILED} worker 1 failed:\nthe earlier error"


def test_elastic_job_reports_why_it_ended_and_its_last_error(folder: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        results(folder, WORKER_FAILED, "the reset limit of 1 is reached\n", elastic=True)
    assert str(raised.value) == (
        f"{PROCESS_FAILED} the reset limit of 1 is reached\nThe last error of a worker, 0:\nthe later error"
    )
