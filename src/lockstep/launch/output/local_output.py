"""The output of workers that are this process's own children, on its way to the display.

One thread reads every worker's pipes and shows a line when it is complete, so that lines are never mixed.
"""

from __future__ import annotations

import os
import selectors
import threading
from dataclasses import dataclass, field
from types import TracebackType

from lockstep.launch.output.display import Display, Name, OutputPlan
from lockstep.launch.output.line_splitter import Lines

CHUNK_BYTES = 1 << 16


@dataclass
class Stream:
    """One worker's stdout or stderr. `rank` may change while it is read: an elastic job's workers move up."""

    rank: int
    name: Name
    writer: int | None
    lines: Lines = field(default_factory=Lines)

    @property
    def path(self) -> str:
        """A name under which this process can open the writing end."""
        return f"/dev/fd/{self.writer}"

    def release(self) -> None:
        """Close the writing end here; the stream then ends when the children that have inherited it do."""
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None


class LocalOutput:
    """Carries the streams of workers on while a `with` block runs; at its end nothing that they wrote is lost.

    Raises:
        ConfigError: There can be no files in the plan's folder.
    """

    def __init__(self, plan: OutputPlan) -> None:
        self._display = Display(plan)
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopping = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._carry, name="lockstep-output", daemon=True)

    def __enter__(self) -> LocalOutput:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.write(self._stopping, b".")
        self._thread.join()
        self._display.close()

    def open(self, rank: int, name: Name) -> Stream:
        """A new stream; until its `writer` is released, it has no end before the job has."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        stream = Stream(rank, name, writer)
        self._selector.register(reader, selectors.EVENT_READ, stream)
        return stream

    def _carry(self) -> None:
        stop = False
        while not stop:
            ready = self._selector.select()
            stop = any(key.fd == self._stop for key, _ in ready)
            for key, _ in ready:
                if key.data:
                    self._read(key.fd, key.data)
        for key in list(self._selector.get_map().values()):
            if key.data:
                key.data.release()
                while self._read(key.fd, key.data):
                    pass
                self._close(key.fd, key.data)
        for end in (self._stop, self._stopping):
            os.close(end)
        self._selector.close()

    def _read(self, reader: int, stream: Stream) -> bool:
        """Read and show what is there now; whether more may follow."""
        try:
            chunk = os.read(reader, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._show(stream, stream.lines.feed(chunk))
        return bool(chunk) or self._close(reader, stream)

    def _close(self, reader: int, stream: Stream) -> bool:
        """Show the last line of a stream and forget it, once; False."""
        if reader in self._selector.get_map():
            self._selector.unregister(reader)
            os.close(reader)
            self._show(stream, stream.lines.rest())
        return False

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        self._display.keep(stream.rank, stream.name, lines)
        self._display.show(stream.rank, stream.name, lines)
