"""A logging handler that keeps the lines, for workers, which pytest's caplog does not see."""

from __future__ import annotations

import logging
from multiprocessing.synchronize import Event


class KeptLines(logging.Handler):
    def __init__(self, first: Event | None = None) -> None:
        """Start without lines; set `first`, on which other workers may wait, at the first line."""
        super().__init__()
        self.lines: list[str] = []
        self._first = first

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self._first:
            self._first.set()
