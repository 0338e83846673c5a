"""metrics.jsonl, the ground truth of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.records import RecordWriter, keep_records
from lockstep.train.trackers.base import Record, Tracker


class RecordTracker(Tracker):
    """Appends every record. A resumed run first drops those that it will write again."""

    def __init__(self, path: Path, start_step: int, in_epoch: bool = False):
        """`in_epoch`: the run goes on within an epoch, so that what was recorded of its end comes again, too."""
        self._path = path
        self._writer = self._begin(start_step, in_epoch)

    def _begin(self, start_step: int, in_epoch: bool) -> RecordWriter:
        def keep(record: dict[str, Any]) -> bool:
            if record.get("kind") == "run":
                return True
            again = in_epoch and record.get("kind") == "epoch" and record.get("step") == start_step
            return 0 < record.get("step", 0) <= start_step and not again

        keep_records(self._path, keep)
        return RecordWriter(self._path)

    def record(self, record: Record) -> None:
        self._writer.write(record)

    def rewind(self, step: int, in_epoch: bool) -> None:
        self._writer.close()
        self._writer = self._begin(step, in_epoch)

    def close(self) -> None:
        self._writer.close()
