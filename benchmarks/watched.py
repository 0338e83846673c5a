"""Time the steps of a training command from outside, by the lines that it prints, and measure its memory.

Nothing in the command is changed, so a tool's own script is measured like a hand-written loop.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

SAMPLE_SECONDS = 0.2
LIMIT_SECONDS = 600.0
SHOWN_LINES = 30  # of a failed command's output


class Steps(NamedTuple):
    """The steps of a command, of which the first and the last ones are not timed.

    Args:
        line: Matches the line that rank 0 prints after each step.
        before: Steps before the timed ones, while caches and queues fill; at least 1.
        timed: Timed steps.
        after: Steps after the timed ones, while the loaders have no more batches to prepare.
    """

    line: re.Pattern[str]
    before: int
    timed: int
    after: int

    @property
    def total(self) -> int:
        return self.before + self.timed + self.after


class Watched(NamedTuple):
    """Seconds from the start of the command to the end of its first step and of the timed steps, and peak memory.

    Args:
        peak_bytes: Maximum over time of the sum of PSS, which counts each shared page once, over all processes of the
            command: launcher, workers and loaders.
    """

    first_step_seconds: float
    timed_seconds: float
    peak_bytes: int


def watch(command: Sequence[str], steps: Steps, folder: Path, environment: Mapping[str, str]) -> Watched:
    """Run a command in a folder to its end. Memory is sampled between the first and the last step, except when timed.

    Raises:
        RuntimeError: The command failed, took too long or printed another number of steps; contains its last lines.
    """
    lines: list[str] = []
    times: list[float] = []  # of the ends of steps
    end = steps.before + steps.timed
    start = time.perf_counter()
    with (
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        _PeakMemory(process.pid, lambda: 0 < len(times) < steps.before or len(times) >= end) as memory,
        _terminated_after(LIMIT_SECONDS, process),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if steps.line.search(line):
                times.append(time.perf_counter() - start)
            lines.append(line)
        status = process.wait()
    if status or len(times) != steps.total:
        shown = "".join(lines[-SHOWN_LINES:])
        result = f"exited with {status}" if status else f"printed {len(times)} steps instead of {steps.total}"
        raise RuntimeError(f"{' '.join(command)} {result}:\n{shown}")
    return Watched(times[0], times[end - 1] - times[steps.before - 1], memory.peak_bytes)


@contextmanager
def _terminated_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Terminate the process if it runs for too long or the context exits early."""
    limit = threading.Timer(seconds, process.terminate)
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
        process.terminate()


class _PeakMemory(threading.Thread):
    """Samples the PSS of a process and its descendants while `is_wanted` returns true."""

    def __init__(self, pid: int, is_wanted: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._pid, self._is_wanted, self._stopped = pid, is_wanted, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            if self._is_wanted():
                self.peak_bytes = max(self.peak_bytes, pss_of_all(self._pid))

    def __enter__(self) -> _PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


def pss_of_all(pid: int) -> int:
    """Return the sum of PSS in bytes over a process and its descendants; 0 if it has exited."""
    size_bytes = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                size_bytes += process.memory_full_info().pss
    return size_bytes
