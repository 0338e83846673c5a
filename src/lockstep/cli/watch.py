"""`lockstep watch`: a live view of a run in the terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console, Group
from rich.live import Live

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.errors import INTERRUPTED, require
from lockstep.report.watch.frame import draw_frame
from lockstep.report.watch.run import RunView, RunWatch, find_run

POLL_SECONDS = 0.1  # for keys and changes of the window's size
WITHOUT_TERMINAL = 30  # lines


@dataclass(frozen=True)
class WatchCommand:
    """Show the progress of a run in the terminal until it finishes or you press q.

    Runs are written by `lockstep train`, lockstep.train.fit and `lockstep run --observe-dir`. Only the run folder is
    read, so the run may be on another machine or finished.
    """

    run: Annotated[Positional[Path | None], arg(metavar="RUN")] = None
    """Run folder. Default: the newest in runs/."""
    interval: float = 2.0
    """Seconds between updates."""
    once: bool = False
    """Print one frame and exit; always on if the output is not a terminal."""

    def __post_init__(self) -> None:
        require(0 < self.interval < float("inf"), "--interval", self.interval, "above 0 seconds")


def main(arguments: Sequence[str]) -> int:
    command = parse(WatchCommand, "watch", arguments)
    watch = RunWatch(find_run(command.run))
    console = Console(highlight=False)
    if command.once or not console.is_terminal:
        while not (snapshot := watch.look(time.time())).is_read:
            pass
        _print(console, snapshot)
        return 0
    try:
        with _terminated():
            last = _follow(console, watch, command.interval)
    except KeyboardInterrupt:
        return INTERRUPTED
    _print(console, last)
    return 0


def _print(console: Console, snapshot: RunView) -> None:
    """Print one frame, which stays above the shell's next prompt."""
    height = console.height - 2 if console.is_terminal else WITHOUT_TERMINAL
    console.print(Group(*draw_frame(snapshot, console.width, height)), soft_wrap=True)


def _follow(console: Console, watch: RunWatch, interval: float) -> RunView:
    """Redraw until the run finishes or q is pressed; return the last snapshot."""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        over = False
        while True:
            snapshot = watch.look(time.time())
            size = None
            until = time.monotonic() + (interval if snapshot.is_read else 0)
            while size is None or time.monotonic() < until:
                if size != console.size:
                    size = console.size
                    live.update(Group(*draw_frame(snapshot, *size)), refresh=True)
                if pressed() == "q":
                    return snapshot
            if over:
                return snapshot
            over = snapshot.state.condition == "finished"  # then read again for the last checkpoint


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that waits up to POLL_SECONDS for a key and returns it in lower case, or "" for none.

    If the input is a terminal, keys are read without echo; its settings are restored at the end.
    """

    def pressed() -> str:
        if not is_terminal:
            time.sleep(POLL_SECONDS)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        key = os.read(sys.stdin.fileno(), 1) if ready else b""
        return "q" if ready and not key else key.decode(errors="replace").lower()  # no key: the terminal was closed

    is_terminal = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if is_terminal else None
    try:
        if is_terminal:
            tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        if before:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _terminated() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the terminal is restored."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
