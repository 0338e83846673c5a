"""Bytes of workers as whole lines, and progress bars as lines now and then."""

from __future__ import annotations

import pytest

from lockstep.launch.output.line_splitter import BAR_SECONDS, Lines


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
