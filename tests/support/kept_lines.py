"""A logging handler that keeps the lines, for workers, which pytest's caplog does not see."""

from __future__ import annotations

import logging


class KeptLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
