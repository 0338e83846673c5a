"""The timeline: when each tensor waits and when it is communicated, as a Chrome trace.

Format: "Trace Event Format", the JSON array that chrome://tracing and https://ui.perfetto.dev open. Each tensor has a
row (a thread): NEGOTIATE_ALLREDUCE from its submission on this worker until all workers agree, then ALLREDUCE.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from lockstep.hvd.engine.request import Collective

logger = logging.getLogger("lockstep.hvd")


class Timeline:
    """Writes events while a file is open. Times are in microseconds since then."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._lines: dict[str, int] = {}
        self._start = 0.0
        self._separator = ""
        self._mark_cycles = False

    def open(self, path: str, mark_cycles: bool = False) -> None:
        """Open a trace file; closes the previous one.

        Raises:
            ValueError: The file cannot be written.
        """
        self.close()
        try:
            file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - a killed job leaves complete lines
        except OSError as error:
            raise ValueError(f"cannot write the timeline to {path}: {error.strerror}") from error
        with self._lock:
            self._lines = {}
            self._start = time.monotonic()
            self._mark_cycles = mark_cycles
            self._file = file
            self._separator = "[\n"
            self._write(name="process_name", ph="M", args={"name": "Horovod operations of rank 0"})

    def close(self) -> None:
        """Close the file, if one is open."""
        with self._lock:
            if self._file is not None:
                file, self._file = self._file, None
                with suppress(OSError):
                    file.write("\n]\n")
                    file.close()

    def cycle(self) -> None:
        """Mark the start of a round."""
        if self._file is not None and self._mark_cycles:
            with self._lock:
                self._write(name="CYCLE_START", ph="i", s="p", ts=self._now())

    @contextmanager
    def activity(self, batch: Sequence[Collective]) -> Iterator[None]:
        """Record the waiting and execution times of a batch of requests, which a `with` block executes."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self._file is not None:
                self._record(batch, began, time.monotonic())

    def _now(self) -> int:
        return self._at(time.monotonic())

    def _at(self, moment: float) -> int:
        return max(0, round((moment - self._start) * 1e6))

    def _record(self, batch: Sequence[Collective], began: float, ended: float) -> None:
        with self._lock:
            for request in batch:
                kind = request.kind.upper()
                waited = self._at(request.submitted), self._at(began)
                worked = self._at(began), self._at(ended)
                arguments = {"bytes": request.size_bytes, "tensors": len(request.tensors), "fused with": len(batch) - 1}
                line = self._line(request.name)
                for name, (start, end) in ((f"NEGOTIATE_{kind}", waited), (kind, worked)):
                    self._write(name=name, ph="X", tid=line, ts=start, dur=end - start, args=arguments)

    def _line(self, name: str) -> int:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = len(self._lines) + 1
            self._write(name="thread_name", ph="M", tid=line, args={"name": name})
        return line

    def _write(self, **event: Any) -> None:
        if self._file is not None:
            try:
                self._file.write(self._separator + json.dumps({"pid": 0, "tid": 0, **event}))
                self._separator = ",\n"
            except OSError as error:  # a full disk must not stop the training
                logger.warning("stopped writing the timeline %s: %s", self._file.name, error.strerror)
                self._file = None
