"""The workers' output at the launcher: stored, and shown; tracebacks wait until the first failure is known."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from lockstep.errors import LOST_PEER
from lockstep.launch.output.display import Display, Name
from lockstep.launch.output.line_splitter import Lines
from lockstep.launch.output.tracebacks import Tracebacks


class Screen:
    """Shows the workers' output, in a thread, so that a blocked terminal does not block the launcher.

    Args:
        holds: Whether tracebacks wait until the job ends.
    """

    def __init__(self, display: Display, holds: bool = True) -> None:
        self._display = display
        self._holds = holds
        self._lines: dict[tuple[int, Name], Lines] = {}
        self._tracebacks: dict[int, Tracebacks] = {}
        self._seen: dict[int, float] = {}
        self._turn = asyncio.Lock()

    async def show(self, rank: int, name: Name, chunk: bytes) -> None:
        """Process a chunk of a worker's output; an empty one is the end."""
        async with self._turn:
            await asyncio.to_thread(self._take, rank, name, chunk)

    async def show_due(self) -> None:
        """Show the tracebacks of workers that keep running, in a loop."""
        while True:
            await asyncio.sleep(1)
            async with self._turn:
                for rank, tracebacks in self._tracebacks.items():
                    if lines := tracebacks.due():
                        await asyncio.to_thread(self._display.show, rank, "stderr", lines)

    def last_lines(self, rank: int) -> str:
        """Return a worker's delayed traceback, or ""."""
        held = self._tracebacks[rank].held if rank in self._tracebacks else []
        return b"".join(held).decode(errors="replace").rstrip("\n")

    def seen(self, rank: int) -> float | None:
        """Return when a worker's delayed traceback arrived."""
        return self._seen.get(rank) if self.last_lines(rank) else None

    def waiting(self) -> list[int]:
        """Return the workers with delayed tracebacks."""
        return [rank for rank, tracebacks in self._tracebacks.items() if tracebacks.held]

    def log_of(self, rank: int) -> Path | None:
        """Return the file with a worker's last output, if there is one."""
        return self._display.log_of(rank)

    def release(self, but: int | None = None) -> None:
        """Show the delayed tracebacks.

        Args:
            but: The worker whose traceback is printed with the failure. Skip it, those it caused, and those in logs.
        """
        for rank, tracebacks in self._tracebacks.items():
            if rank == but or (but is not None and self._is_consequence(rank)):
                continue
            self._display.show(rank, "stderr", tracebacks.release())

    def _is_consequence(self, rank: int) -> bool:
        return self.log_of(rank) is not None or any(words in self.last_lines(rank) for words in LOST_PEER)

    def _take(self, rank: int, name: Name, chunk: bytes) -> None:
        stream = self._lines.setdefault((rank, name), Lines())
        lines = stream.feed(chunk) if chunk else stream.rest()
        self._display.keep(rank, name, lines)
        if name == "stderr" and self._holds:
            tracebacks = self._tracebacks.setdefault(rank, Tracebacks())
            waited = bool(tracebacks.held)
            lines = tracebacks.feed(lines)
            if tracebacks.held and not waited:
                self._seen[rank] = time.monotonic()
        self._display.show(rank, name, lines)
