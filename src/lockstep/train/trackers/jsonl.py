"""metrics.jsonl, the authoritative record of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.files.jsonl import format_record, keep_records
from lockstep.files.resilient_file import PatientFile
from lockstep.train.run_folder import logger
from lockstep.train.trackers.base import Record, Tracker


class RecordTracker(Tracker):
    """Appends every record; while the disk is full, records wait in memory.

    A resumed run first removes the records that it will write again.

    Args:
        in_epoch: The run resumes within an epoch, so the record of the epoch's end is written again, too.
        warn: Called with a line to print when records cannot be written.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(
        self, path: Path, start_step: int, in_epoch: bool = False, warn: Callable[[str], None] = logger.warning
    ):
        self._path, self._warn = path, warn
        self._file = self._begin(start_step, in_epoch)

    def _begin(self, start_step: int, in_epoch: bool) -> PatientFile:
        def keep(record: dict[str, Any]) -> bool:
            if record.get("kind") == "run":
                return True
            at_end = record.get("kind") == "epoch" and record.get("step") == start_step
            if at_end and not in_epoch:
                self._recorded.add((start_step, record.get("split")))
            return 0 < record.get("step", 0) <= start_step and not (at_end and in_epoch)

        self._recorded: set[tuple[int, Any]] = set()  # a complete run that is resumed repeats its last evaluation
        try:
            keep_records(self._path, keep)
            return PatientFile(self._path, self._warn)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written: {error}; free disk space, or choose another --run-dir"
            ) from None

    def record(self, record: Record) -> None:
        if record["kind"] != "epoch" or (record["step"], record["split"]) not in self._recorded:
            self._file.write(format_record(record))

    def unwritten(self) -> list[str]:
        return [problem for problem in (self._file.flush(),) if problem]

    def rewind(self, step: int, in_epoch: bool) -> None:
        self._file.close()
        self._file = self._begin(step, in_epoch)

    def close(self) -> None:
        self._file.close()
