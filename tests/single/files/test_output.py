"""Whether this process has a terminal to hand on."""

from __future__ import annotations

import os
import pty
import termios
import tty
from collections.abc import Callable
from contextlib import suppress

import pytest

from lockstep.files.output import has_terminal, restored_terminal


def _in_a_terminal(check: Callable[[], bool]) -> bool:
    """Run a check in a process whose streams are a terminal, in the foreground of which it is."""
    pid, terminal = pty.fork()
    if not pid:
        code = 2
        with suppress(BaseException):
            code = int(check())
        os._exit(code)
    with suppress(OSError):  # the terminal is closed
        while os.read(terminal, 1 << 16):
            pass
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return bool(code)


def _in_a_child(leave: Callable[[], object], check: Callable[[], bool]) -> bool:
    """Run a check in a child that has left the foreground, or the session."""
    pid = os.fork()
    if not pid:
        code = 2
        with suppress(BaseException):
            leave()
            code = int(check())
        os._exit(code)
    return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_process_in_the_foreground_has_its_terminal() -> None:
    assert _in_a_terminal(has_terminal)


def test_terminal_gets_its_settings_back() -> None:
    def check() -> bool:
        before = termios.tcgetattr(0)
        with restored_terminal():
            tty.setraw(0, termios.TCSANOW)  # as a prompt does
            changed = termios.tcgetattr(0)
        return termios.tcgetattr(0) == before != changed

    assert _in_a_terminal(check)


@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_redirected_stream_is_not_the_terminal(stream: int, is_terminal: bool) -> None:
    def check() -> bool:
        other = pty.openpty()[1] if is_terminal else os.open(os.devnull, os.O_RDWR)
        os.dup2(other, stream)
        return not has_terminal()

    assert _in_a_terminal(check)


def test_a_terminal_that_can_only_be_read_is_not_handed_on() -> None:
    def check() -> bool:
        os.dup2(os.open(os.ttyname(0), os.O_RDONLY | os.O_NOCTTY), 0)
        return not has_terminal()

    assert _in_a_terminal(check)


def test_a_terminal_without_a_name_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> str:
        raise OSError(19, "No such device")  # in a container that does not have the terminal's file

    monkeypatch.setattr(os, "ttyname", fail)
    assert _in_a_terminal(lambda: not has_terminal())


def test_the_terminal_is_left_to_the_foreground() -> None:
    assert _in_a_terminal(lambda: _in_a_child(lambda: os.setpgid(0, 0), lambda: not has_terminal()))
    # Of a terminal that does not control its processes, none is in the background.
    assert _in_a_terminal(lambda: _in_a_child(os.setsid, has_terminal))
