"""`lockstep watch`: a live view of a run in the terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
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

WITHOUT_TERMINAL = 30  # lines


@dataclass(frozen=True)
class WatchCommand:
    """Show the progress of a run in the terminal until it finishes or you press Ctrl-C.

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
    is_live = console.is_terminal and not command.once
    try:
        view = _follow(console, watch, command.interval) if is_live else watch.look(time.time())
    except KeyboardInterrupt:
        return INTERRUPTED
    height = console.height - 2 if console.is_terminal else WITHOUT_TERMINAL  # above the shell's next prompt
    console.print(Group(*draw_frame(view, console.width, height)), soft_wrap=True)
    return 0


def _follow(console: Console, watch: RunWatch, interval: float) -> RunView:
    """Redraw until the run finishes; return the last view."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # restores the terminal
    is_over = False
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = watch.look(time.time())
            live.update(Group(*draw_frame(view, *console.size)), refresh=True)
            if is_over:
                return view
            is_over = view.state.condition == "finished"  # then read again for the last checkpoint
            time.sleep(interval)
