"""The default folder of `lockstep run`'s logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.run import LOGS, new_logs


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
