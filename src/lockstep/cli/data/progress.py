"""Progress of a long command: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

LINE_SECONDS = 10


@contextmanager
def progress(doing: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items completed; the unit "bytes" is shown as MB or GB."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, doing, total, unit) as advance:
            yield advance
    else:
        yield _Lines(doing, total, unit).advance


@contextmanager
def _bar(console: Console, doing: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counts = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    with Progress(TextColumn(doing), BarColumn(), counts, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, doing: str, total: int, unit: str):
        self._doing, self._total, self._unit = doing, total, unit
        self._done, self._printed_at = 0, time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._printed_at = time.monotonic()
            share = 100 * self._done / max(1, self._total)
            line = f"{self._doing}: {self._done:,} of {self._total:,} {self._unit} ({share:.0f} %)"
            print(line, file=sys.stderr, flush=True)
