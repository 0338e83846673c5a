"""TensorBoard event files."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.imports import collector_paused
from lockstep.train.run_folder import logger
from lockstep.train.trackers.base import Record, Tracker, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ROOM_BYTES = 1 << 20  # free disk space required to write


class TensorBoardTracker(Tracker):
    """Writes scalars over optimizer steps; a resumed run hides the steps that it repeats.

    On a full disk the event file is closed, with one warning, and a new one is opened when there is space. The curve
    has a gap; `metrics.jsonl` is complete. TensorBoard is imported with the first record, not before the first step.
    """

    def __init__(self, folder: Path, start_step: int, warn: Callable[[str], None] = logger.warning):
        self._folder = folder
        self._warn, self._has_warned = warn, False
        self._writer: SummaryWriter | None = None
        self._hidden_from: int | None = start_step + 1  # the next file hides earlier files from this step on

    def record(self, record: Record) -> None:
        figures = scalars(record)
        if not figures:
            return
        try:
            self._check_room()
            self._writer = self._writer or self._open()
            self._write(self._writer, figures, record["step"])
        except OSError as error:
            if not self._has_warned:
                self._warn(f"{self._folder} cannot be written: {error.strerror or error}; metrics.jsonl is complete")
            self._has_warned = True
            self._give_up()

    @staticmethod
    def _write(writer: SummaryWriter, figures: Mapping[str, float], step: int) -> None:
        """Write one event for all scalars: `add_scalar` takes five times as long, as it writes one for each."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        writer._get_file_writer().add_summary(Summary(value=values), step)

    def rewind(self, step: int, in_epoch: bool) -> None:
        self._give_up()
        self._hidden_from = step + 1
        with suppress(OSError):  # on failure, the next record opens one
            self._writer = self._open()

    def close(self) -> None:
        self._give_up()

    def _open(self) -> SummaryWriter:
        with collector_paused():
            from torch.utils.tensorboard import SummaryWriter

        try:
            writer = SummaryWriter(str(self._folder), purge_step=self._hidden_from)
        except UnicodeEncodeError:
            raise OSError(errno.EINVAL, "TensorBoard needs a path that is valid UTF-8") from None
        self._hidden_from = None
        return writer

    def _check_room(self) -> None:
        """Check the disk first, because an error in TensorBoard's thread would print a traceback to stderr.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self._folder).free < ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not os.access(self._folder, os.W_OK):
            raise OSError(errno.EROFS, "read-only")

    def _give_up(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # raised again for buffered data
                writer.close()
