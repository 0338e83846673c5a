"""What `lockstep run` does with the terminal and the logs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.run import LOGS, new_logs
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.job_plan import JobPlan


def test_a_job_goes_on_without_default_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    logs = new_logs()
    assert logs
    assert logs.is_dir()
    assert logs.parent == LOGS
    logs.rmdir()
    LOGS.rmdir()
    LOGS.write_text("a file, so that no folder can be created")
    assert new_logs() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: warning: no logs: lockstep-logs/")
    assert line.endswith(": Not a directory; choose a folder with --log-dir DIR")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("flags", "has_terminal"),
    [("", True), ("-np 2", False), ("--prefix", False), ("--log-dir logs", False), ("-H localhost:1", True)],
)
def test_one_worker_has_the_terminal_unless_output_is_wanted(
    flags: str, has_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bool, bool]] = []

    def run(jobs: JobSeries, plan: JobPlan, output: OutputPlan, **_: object) -> int:
        found.append((plan.terminal, output.logs is None))
        return 0

    for name, stand_in in (("has_terminal", lambda: True), ("restored_terminal", nullcontext)):
        monkeypatch.setattr(f"lockstep.cli.run.{name}", stand_in)
    monkeypatch.setattr(JobSeries, "run", run)
    assert main(["run", "--no-observe", *flags.split(), "--", "true"]) == 0
    assert found == [(has_terminal, has_terminal)]
