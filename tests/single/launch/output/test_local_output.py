"""Workers' output: none of it is lost, and each line says whose it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.output.display import OutputPlan
from lockstep.launch.output.local_output import LocalOutput


def test_streams_are_prefixed_and_kept_in_files(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with LocalOutput(OutputPlan(11, folder=tmp_path)) as output:
        first, second, error = output.open(0, "stdout"), output.open(10, "stdout"), output.open(10, "stderr")
        os.write(first.writer, b"to")
        os.write(second.writer, b"whole\n")
        os.write(first.writer, b"rn\nlast")
        os.write(error.writer, b"trouble\n")
    out, err = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == [b"[0]<stdout>:last", b"[0]<stdout>:torn", b"[10]<stdout>:whole"]
    assert err == b"[10]<stderr>:trouble\n"
    assert (tmp_path / "rank.00" / "stdout").read_bytes() == b"torn\nlast\n"
    assert (tmp_path / "rank.10" / "stdout").read_bytes() == b"whole\n"
    assert (tmp_path / "rank.10" / "stderr").read_bytes() == b"trouble\n"


def test_nothing_is_lost_when_much_is_written_at_the_end(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with LocalOutput(OutputPlan(1)) as output:
        stream = output.open(0, "stdout")
        with open(stream.path, "wb") as writer:
            writer.writelines(b"%d\n" % number for number in range(50_000))
    lines = capfdbinary.readouterr().out.splitlines()
    assert lines == [b"[0]<stdout>:%d" % number for number in range(50_000)]


def test_what_cannot_be_written_is_said_once_and_the_rest_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank.0").write_text("in the way")
    with Path("/dev/full").open("w") as full, LocalOutput(OutputPlan(1, folder=tmp_path)) as output:
        monkeypatch.setattr("sys.stdout", full)
        out, error = output.open(0, "stdout"), output.open(0, "stderr")
        for _ in range(9):
            os.write(out.writer, b"x" * 60_000 + b"\n")
        os.write(error.writer, b"seen\n")
    lines = capfd.readouterr().err.splitlines()
    assert "[0]<stderr>:seen" in lines
    assert len(lines) == 4
    assert "lockstep: stdout cannot be written: No space left on device" in lines


def test_a_folder_that_cannot_be_is_an_error_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output-filename .*file"):
        LocalOutput(OutputPlan(1, folder=tmp_path / "file"))


def test_a_line_may_begin_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "now")
    assert OutputPlan(2, timestamps=True).prefix(1, "stderr") == b"now[1]<stderr>:"
