"""Bytes and operations of a whole job over time, out of the records that each worker keeps for itself.

Worker N of a run appends to RUN/io/worker-N.jsonl (docs/reference/run-folder.md lists the fields). An amount is what
was read or written in the `seconds` that ended at `unix_time`; so workers need not sample together, and sessions of a
resumed run, also on another number of workers, stand in the same files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.files.fields import plausible
from lockstep.files.jsonl import read_records

KIND = "io"
_NEEDED = frozenset({"rank", "unix_time", "seconds"})
_NO_AMOUNTS = _NEEDED | {"kind"}
LONGEST_SECONDS = 1e6  # records of more time are damage
MOST_STRETCHES = 100_000  # of the longest record; a damaged one's time would else be cut into more than memory holds


def worker_file(run: Path, rank: int) -> Path:
    """Where a worker keeps its I/O records."""
    return run / "io" / f"worker-{rank}.jsonl"


def job_io(
    run: Path, width_seconds: float | None = None, on_damage: Callable[[Path], None] = lambda path: None
) -> list[dict[str, float]]:
    """The job's rates over time: the sums over its workers, and of `node_...` over its nodes.

    Args:
        run: The run folder.
        width_seconds: Of one stretch of time; by default the usual time between two records.
        on_damage: Told the file of each line that is no whole record, or lacks what every record has.

    Returns:
        One row for each stretch in which a worker recorded, in the order of time: `unix_time` (its start), `seconds`
        (how much of it the records cover) and, for each amount in the records, NAME_per_second. Over all rows, rates
        times seconds add up to the amounts recorded. Empty if the run has no such records.
    """
    records = [record for path in sorted((run / "io").glob("worker-*.jsonl")) for record in _whole(path, on_damage)]
    if not records:
        return []
    least = max(record["seconds"] for record in records) / MOST_STRETCHES
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
    """The stretches of time that an interval touches, each with the seconds that it has there."""
    for stretch in range(int(start // width), int(end // width) + 1):
        seconds = min(end, (stretch + 1) * width) - max(start, stretch * width)
        if seconds > 0:
            yield stretch, seconds
