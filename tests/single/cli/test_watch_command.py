"""`lockstep watch`: what a user types, and sees, also on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from time_limits import Limit

from lockstep.cli import main

ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 2 epochs, of which one is done."""
    folder = tmp_path / "runs" / "a-run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("epochs: 2\n")
    now = time.time()
    job = {"workers": 1, "global_batch": 8, "steps_per_epoch": 10, "arch": "net", "data": "digits"}
    _append(folder, {"kind": "run", "step": 0, "unix_time": now - 9, **job})
    figures = {"loss": 0.5, "top1": 0.8, "images_per_second": 7.0}
    _append(folder, {"kind": "step", "step": 10, "time_seconds": 1.0, "unix_time": now, **figures})
    return folder


def _append(folder: Path, record: dict[str, object]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def _finish(folder: Path) -> None:
    place = {"kind": "epoch", "split": "val", "step": 20, "time_seconds": 1.0, "unix_time": time.time()}
    _append(folder, {**place, "epochs": 2, "top1": 0.9})


def test_without_a_terminal_one_frame_is_printed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent.parent)
    for words in (["watch"], ["watch", "runs/a-run", "--once"]):
        assert main(words) == 0
        frame = capsys.readouterr().out
        assert "net on digits · 1 worker" in frame
        assert "step 10 of 20" in frame
        assert "\x1b" not in frame


class _Terminal:
    """`lockstep watch` on a terminal of 80 × 24."""

    def __init__(self, *words: str):
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            # Not execv: readline has set LINES and COLUMNS behind Python's back, and they outweigh the terminal's size.
            command = [sys.executable, "-m", "lockstep", "watch", "--interval", "0.2", *words]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm"})
        self.resize(24, 80)
        self.shown = b""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self._descriptor, key)

    def wait_for(self, text: bytes) -> None:
        since, limit = len(self.shown), Limit()
        while text not in self.shown[since:]:
            assert self._read(limit), f"{text!r} was not shown: {self.shown!r}"

    def end(self) -> int:
        """Its exit code."""
        limit = Limit()
        while self._read(limit):
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(status)

    def _read(self, limit: Limit) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], limit.left())
        try:
            data = os.read(self._descriptor, 1 << 16) if ready else b""
        except OSError:  # it has ended
            data = b""
        self.shown += data
        return bool(data)


@pytest.mark.cold
def test_view_stays_until_ctrl_c_and_restores_the_screen(run: Path) -> None:
    terminal = _Terminal(str(run))
    terminal.wait_for(b"step 10 of 20")
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert terminal.shown.count(ENTER) == terminal.shown.count(LEAVE) == 1
    assert SHOW_CURSOR in terminal.shown
    assert b"Traceback" not in terminal.shown


@pytest.mark.cold
def test_view_ends_with_the_run_and_keeps_the_last_frame(run: Path) -> None:
    terminal = _Terminal(str(run))
    terminal.wait_for(b"running")
    _finish(run)
    assert terminal.end() == 0
    after = terminal.shown.partition(LEAVE)[2]
    assert b"finished" in after
    assert b"step 20 of 20" in after
