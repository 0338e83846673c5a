"""metrics.jsonl, the ground truth of a run."""

from __future__ import annotations

from pathlib import Path

from lockstep.records import RecordWriter, keep_records
from lockstep.train.trackers.base import Record, Tracker


class RecordTracker(Tracker):
    """Appends every record. A resumed run first drops the records of steps that it will take again."""

    def __init__(self, path: Path, start_step: int):
        keep_records(path, lambda record: 0 < record.get("step", 0) <= start_step or record.get("kind") == "run")
        self._writer = RecordWriter(path)

    def record(self, record: Record) -> None:
        self._writer.write(record)

    def close(self) -> None:
        self._writer.close()
