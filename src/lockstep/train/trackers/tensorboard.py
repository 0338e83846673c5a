"""TensorBoard event files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from lockstep.train.run_folder import logger
from lockstep.train.trackers.base import Record, Tracker, scalars

ROOM_BYTES = 1 << 20  # free on the disk before a new file is begun


class TensorBoardTracker(Tracker):
    """Writes scalars over optimizer steps; a resumed run hides the steps that it takes again.

    A disk that takes no more ends the event file, which is told once; when there is room, another one goes on. The
    curve has a gap there: `metrics.jsonl` has all of it.
    """

    def __init__(self, folder: Path, start_step: int, tell: Callable[[str], None] = logger.warning):
        self._folder = folder
        self._tell, self._told = tell, False
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=start_step + 1)

    def record(self, record: Record) -> None:
        figures = scalars(record)
        if not figures:
            return
        try:
            writer = self._writer = self._writer or self._begin_again()
            if writer is not None:
                for tag, value in figures.items():
                    writer.add_scalar(tag, value, record["step"])
        except OSError as error:
            if not self._told:
                self._tell(
                    f"{self._folder} cannot be written: {error.strerror or error}; metrics.jsonl has all figures"
                )
            self._told = True
            self._give_up()

    def close(self) -> None:
        self._give_up()

    def _begin_again(self) -> SummaryWriter | None:
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.is_dir())
        return SummaryWriter(str(self._folder)) if shutil.disk_usage(there).free > ROOM_BYTES else None

    def _give_up(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # raised again for what is not written yet
                writer.close()
