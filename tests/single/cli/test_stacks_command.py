"""`lockstep stacks RUN` for run folders without a job that it can show: one message each."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lockstep.cli import main, stacks
from lockstep.diagnosis.inspection import WorkerState
from lockstep.files.folder_lock import LOCK_FILE, Owner, holding

ELSEWHERE = replace(Owner("lockstep train"), host="node7", pid=12, machine="another boot")


@pytest.fixture(autouse=True)
def no_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "launchers", list)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["stacks", *words]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("epochs: 2\n")
    return folder


def test_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, str(tmp_path / "x"))
    expected = "no such folder; pass a run folder or the process number of a launcher"
    assert text == f"lockstep stacks: error: {tmp_path}/x: {expected}\n"


def test_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "not a run folder; a run folder contains config.yaml or metrics.jsonl"
    assert refused(capsys, str(tmp_path)) == f"lockstep stacks: error: {tmp_path}: {expected}\n"


@pytest.mark.parametrize("exited", [None, replace(Owner("lockstep train"), started=1.0)])
def test_a_run_that_has_finished(run: Path, exited: Owner | None, capsys: pytest.CaptureFixture[str]) -> None:
    if exited:
        (run / LOCK_FILE).write_text(json.dumps(asdict(exited)))
    expected = f"no job writes to this run; its last state: lockstep watch {run}"
    assert refused(capsys, str(run)) == f"lockstep stacks: error: {run}: {expected}\n"


def test_a_run_on_another_host(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / LOCK_FILE).write_text(json.dumps(asdict(ELSEWHERE)))
    text = refused(capsys, str(run))
    assert text.startswith(f"lockstep stacks: error: {run} is in use by lockstep train, process 12 on node7, since ")
    assert text.endswith('; run "lockstep stacks" on node7, or on the host where you started the job\n')


def test_a_run_that_no_launcher_started(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holding(run, "lockstep train"):
        text = refused(capsys, str(run))
    assert f"in use by lockstep train, process {os.getpid()} on " in text
    assert text.endswith(
        f"; Lockstep's launcher did not start it; to see its stack, run: py-spy dump --pid {os.getpid()}\n"
    )


def test_run_with_local_launcher_and_remote_rank_0_is_explained(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / LOCK_FILE).write_text(json.dumps(asdict(ELSEWHERE)))
    jobs = {
        5: [("", WorkerState(0, pid=11))],
        6: [("node7", WorkerState(0, pid=12)), ("node8", WorkerState(1, pid=11))],
    }
    monkeypatch.setattr(stacks, "launchers", lambda: list(jobs))
    monkeypatch.setattr(stacks, "ask", lambda pid: (f"job {pid}", jobs[pid]))
    assert main(["stacks", str(run)]) == 0
    title, *groups = capsys.readouterr().out.split("\n\n")
    assert title == "job 6 · process 6"
    assert [group.split(" · ")[0] for group in groups] == ["rank 0 on node7", "rank 1 on node8"]


def test_a_launcher_that_does_not_respond(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(pid: int) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(stacks, "launchers", lambda: [5])
    monkeypatch.setattr(stacks, "ask", ask)
    with holding(run, "lockstep train"):
        assert refused(capsys, str(run)).endswith("; launcher 5 does not respond: timed out\n")
