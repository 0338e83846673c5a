"""Whether this process has a terminal to hand on."""

from __future__ import annotations

import fcntl
import os
import pty
import termios
import tty
from collections.abc import Iterator

import pytest

from lockstep.files.output import has_terminal, restored_terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Descriptors that stand for this process's streams: those of a terminal, in whose foreground it is."""
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(range(3), theirs)
    name, flags = os.ttyname, fcntl.fcntl
    monkeypatch.setattr(os, "ttyname", lambda stream: name(streams[stream]))
    monkeypatch.setattr(fcntl, "fcntl", lambda stream, command: flags(streams[stream], command))
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    yield streams
    os.close(ours)
    os.close(theirs)


def test_a_process_in_the_foreground_has_its_terminal(terminal: dict[int, int]) -> None:
    assert has_terminal()


def test_terminal_gets_its_settings_back(terminal: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = terminal[0]
    get, put = termios.tcgetattr, termios.tcsetattr
    monkeypatch.setattr(termios, "tcgetattr", lambda _: get(ours))
    monkeypatch.setattr(termios, "tcsetattr", lambda _, when, settings: put(ours, when, settings))
    before = get(ours)
    with restored_terminal():
        tty.setraw(ours, termios.TCSANOW)  # as a prompt does
        changed = get(ours)
    assert get(ours) == before != changed


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_redirected_stream_is_not_the_terminal(stream: int, terminal: dict[int, int]) -> None:
    for other in (os.open(os.devnull, os.O_RDWR), *pty.openpty()):
        terminal[stream] = other
        has = has_terminal()
        os.close(other)
        assert not has


def test_a_terminal_that_can_only_be_read_is_not_handed_on(terminal: dict[int, int]) -> None:
    terminal[0] = os.open(os.ttyname(0), os.O_RDONLY | os.O_NOCTTY)
    has = has_terminal()
    os.close(terminal[0])
    assert not has


def test_a_terminal_without_a_name_is_not_handed_on(terminal: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> str:
        raise OSError(19, "No such device")  # in a container that does not have the terminal's file

    monkeypatch.setattr(os, "ttyname", fail)
    assert not has_terminal()


def test_the_terminal_is_left_to_the_foreground(terminal: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    assert not has_terminal()

    def fail(_: int) -> int:
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(os, "tcgetpgrp", fail)  # of a terminal that controls no processes
    assert has_terminal()
