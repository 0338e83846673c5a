"""Workers' output: whole lines, none lost, progress bars as lines now and then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.output.display import OutputPlan
from lockstep.launch.output.line_splitter import BAR_SECONDS, Lines
from lockstep.launch.output.local_output import LocalOutput


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_whole_however_the_bytes_arrive(size: int) -> None:
    data = "one\n\nthrée\r\nlast".encode()
    lines = Lines()
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    assert [line for chunk in chunks for line in lines.feed(chunk)] == [b"one\n", b"\n", "thrée\n".encode()]
    assert lines.rest() == [b"last\n"]
    assert lines.rest() == []


def test_a_progress_bar_is_a_line_now_and_then_and_in_the_end() -> None:
    now = 0.0
    lines = Lines(clock=lambda: now)
    assert lines.feed(b"\r 1%") == []
    assert lines.feed(b"\r 2%") == [b" 1%\n"]
    assert lines.feed(b"\r 3%\r 4%\r") == []
    now = BAR_SECONDS
    assert lines.feed(b" 5%\r 6%") == [b" 5%\n"]
    assert lines.feed(b"\r100%\r\n") == [b"100%\n"]
    assert lines.feed(b"plain\n") == [b"plain\n"]
    assert len(lines.held) == 0


def test_a_bar_that_was_just_shown_is_not_shown_twice() -> None:
    lines = Lines()
    assert lines.feed(b"\rdone\r") == [b"done\n"]
    assert lines.feed(b"\n") == []


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
