"""The I/O of a job's workers: records of it, and the rates of the whole job over time.

The records of worker N of a run are in RUN/io/worker-N.jsonl (docs/reference/run-folder.md lists the fields). An amount
covers the `seconds` that end at `unix_time`. Workers may therefore sample at different times, and all sessions of a
resumed run share the same files, whatever their number of workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.files.io_totals import KIND
from lockstep.files.jsonl import RecordWriter, plausible, read_records

_NEEDED = frozenset({"rank", "unix_time", "seconds"})
_NO_AMOUNTS = _NEEDED | {"kind"}
LONGEST_SECONDS = 1e6  # records of longer intervals are damaged
MAX_STRETCHES = 100_000  # per record, to bound memory if a record is damaged


def worker_file(run: Path, rank: int) -> Path:
    """Return the path of a worker's I/O records."""
    return run / "io" / f"worker-{rank}.jsonl"


def append_record(run: Path, record: Mapping[str, Any]) -> None:
    """Append a record to its worker's file.

    Raises:
        OSError: The file cannot be written.
    """
    path = worker_file(run, record["rank"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(RecordWriter(path)) as writer:
        writer.write(record)


def job_io(
    run: Path, width_seconds: float | None = None, on_damage: Callable[[Path], None] = lambda path: None
) -> list[dict[str, float]]:
    """Return the job's I/O rates over time, summed over its workers (`node_...`: over its nodes).

    Args:
        run: The run folder.
        width_seconds: Length of one interval; by default the median time between records.
        on_damage: Called with the file of each line that is damaged or lacks a required field.

    Returns:
        One row for each interval with records, in order of time: `unix_time` (its start), `seconds` (how much of it the
        records cover) and NAME_per_second for each amount in the records. Summed over all rows, rate times seconds
        equals the recorded amounts. Empty if the run has no such records.
    """
    records = [record for path in sorted((run / "io").glob("worker-*.jsonl")) for record in _whole(path, on_damage)]
    if not records:
        return []
    least = max(record["seconds"] for record in records) / MAX_STRETCHES
    width = max(width_seconds or median(record["seconds"] for record in records), least)
    amounts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    covered: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for record in records:
        for stretch, seconds in _stretches(record["unix_time"] - record["seconds"], record["unix_time"], width):
            covered[stretch][record["rank"]] += seconds
            for name in record.keys() - _NO_AMOUNTS:
                amounts[stretch][name] += record[name] * seconds / record["seconds"]
    names = sorted({name for row in amounts.values() for name in row})
    rows = []
    for stretch in sorted(amounts):
        seconds = min(width, max(covered[stretch].values()))
        rates = {f"{name}_per_second": amounts[stretch][name] / seconds for name in names}
        rows.append({"unix_time": stretch * width, "seconds": seconds, **rates})
    return rows


def _whole(path: Path, on_damage: Callable[[Path], None]) -> Iterator[Mapping[str, Any]]:
    for record in read_records(path, lambda line: on_damage(path)):
        if record.get("kind") != KIND:
            continue
        figures = {name: value for name, value in record.items() if name != "kind"}
        is_whole = figures.keys() >= _NEEDED and None not in map(plausible, figures.values())
        if not is_whole or record["seconds"] > LONGEST_SECONDS:
            on_damage(path)
        elif record["seconds"] > 0:
            yield record


def _stretches(start: float, end: float, width: float) -> Iterator[tuple[int, float]]:
    """Yield the index of each stretch of `width` seconds that overlaps an interval, with the overlap in seconds."""
    for stretch in range(int(start // width), int(end // width) + 1):
        seconds = min(end, (stretch + 1) * width) - max(start, stretch * width)
        if seconds > 0:
            yield stretch, seconds
