"""Repeat measurements, summarize them as medians with quartiles, and write the records of studies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from lockstep.errors import ConfigError
from lockstep.files.jsonl import RecordWriter
from lockstep.train.monitoring.io_sampling import CountersMissingError, IoCounters


class ComparisonTurn(NamedTuple):
    """One repeat of a measurement.

    Args:
        size_bytes: Of the images.
        operations: Number of read calls; None if the system does not count them.
        storage_bytes: Bytes that storage delivered; None if the system does not count them.
    """

    seconds: float
    images: int
    size_bytes: int
    operations: int | None = None
    storage_bytes: int | None = None


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Figure:
    """The repeats of one measurement, and their rates."""

    name: str
    about: str
    turns: Sequence[ComparisonTurn]

    @property
    def images_per_second(self) -> Spread:
        return spread([turn.images / turn.seconds for turn in self.turns])

    @property
    def bytes_per_second(self) -> Spread:
        return spread([turn.size_bytes / turn.seconds for turn in self.turns])

    @property
    def operations_per_second(self) -> Spread | None:
        counted = [turn.operations / turn.seconds for turn in self.turns if turn.operations is not None]
        return spread(counted) if counted else None

    def to_mapping(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "about": self.about,
            "images_per_second": self.images_per_second._asdict(),
            "bytes_per_second": self.bytes_per_second._asdict(),
            "operations_per_second": self.operations_per_second._asdict() if self.operations_per_second else None,
            "repeats": [turn._asdict() for turn in self.turns],
        }


class ReadCounter:
    """Counts reads of this process and its children, if the system does."""

    def __init__(self) -> None:
        try:
            self._counters: IoCounters | None = IoCounters()
        except CountersMissingError:
            self._counters = None

    def take(self) -> tuple[int, int] | tuple[None, None]:
        """Return read calls and bytes delivered by storage since the last `take`, or (None, None)."""
        if self._counters is None:
            return None, None
        amounts = self._counters.take()
        return amounts["read_operations"], amounts["storage_read_bytes"]


def repeat(work: Callable[[], tuple[int, int]], repeats: int, seconds: float) -> list[ComparisonTurn]:
    """Call `work`, which returns (images, bytes), for `seconds` in each repeat, after one warm-up call."""
    work()
    turns, counter = [], ReadCounter()
    for _ in range(repeats):
        images = size_bytes = 0
        counter.take()
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or not images:
            done = work()
            images, size_bytes = images + done[0], size_bytes + done[1]
        turns.append(ComparisonTurn(elapsed, images, size_bytes, *counter.take()))
    return turns


def check_record_file(path: Path) -> None:
    """Create the folder of a study's records and check that the file is writable, before measuring.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}; choose another file") from None


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a study's record, with the time."""
    writer = RecordWriter(path)
    writer.write({**record, "unix_time": time.time()})
    writer.close()


def spread(values: Sequence[float]) -> Spread:
    """Return the quartiles of repeated measurements; a single value is returned three times."""
    return (
        Spread(*quantiles(values, method="inclusive")) if len(values) > 1 else Spread(values[0], values[0], values[0])
    )
