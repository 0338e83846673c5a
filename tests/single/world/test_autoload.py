"""What a worker sets when it imports torch."""

from __future__ import annotations

import multiprocessing.util
import os
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from lockstep.diagnosis import CHECK, FOLDER, MEASURE, OBSERVE
from lockstep.world.autoload import attach, name_after_job, observe_if_asked


@pytest.mark.parametrize("is_short", [True, False])
def test_sockets_and_semaphores_go_with_the_job(
    is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Path("/tmp/lockstep-job-abcdefgh" if is_short else tmp_path / ("long" * 25) / "lockstep-job-abcdefgh")
    settings = {"semprefix": "/mp", "authkey": b""}
    monkeypatch.setattr(multiprocessing.current_process(), "_config", settings)
    monkeypatch.setenv(FOLDER, str(job / "boards"))
    name_after_job()
    assert settings["semprefix"] == "/lockstep-job-abcdefgh"
    assert settings.get("tempdir") == (str(job / "boards") if is_short else None)
    assert not is_short or multiprocessing.util.get_temp_dir() == str(job / "boards")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_programs_are_not_touched_unless_that_is_asked(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(OBSERVE, raising=False)
    if value is not None:
        monkeypatch.setenv(OBSERVE, value)
    before = dict(vars(distributed_c10d))
    attach()
    assert vars(distributed_c10d) == before


def test_what_a_worker_is_asked_for_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name in (OBSERVE, MEASURE, CHECK):
        monkeypatch.setenv(name, "1")
    observe_if_asked()
    assert not {OBSERVE, MEASURE, CHECK} & os.environ.keys()
