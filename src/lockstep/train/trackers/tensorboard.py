"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from lockstep.train.trackers.base import Record, Tracker, scalars


class TensorBoardTracker(Tracker):
    """Writes scalars over optimizer steps; a resumed run hides the steps that it takes again."""

    def __init__(self, folder: Path, start_step: int):
        self._folder = str(folder)
        self._writer = SummaryWriter(self._folder, purge_step=start_step + 1)

    def record(self, record: Record) -> None:
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record["step"])

    def rewind(self, step: int, in_epoch: bool) -> None:
        self._writer.close()
        self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()
