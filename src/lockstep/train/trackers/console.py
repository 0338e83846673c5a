"""Progress for people: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lockstep.train.trackers.base import Record, Tracker


class PlainConsole(Tracker):
    """One line an epoch and split, as text."""

    def say(self, line: str) -> None:
        print(line, flush=True)

    def record(self, record: Record) -> None:
        if record["kind"] == "epoch":
            self.say(describe(record))


class TerminalConsole(PlainConsole):
    """The same lines, and below them a bar for the epoch that runs, with the newest figures of all workers."""

    def __init__(self, console: Console):
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            refresh_per_second=4,  # drawing 10 times a second, as is the default, costs 1 to 2 % of one core
        )
        self._task: TaskID | None = None

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._end_task()
        self._progress.start()
        self._task = self._progress.add_task(f"epoch {epoch + 1}/{epochs}", total=steps, completed=done, figures="")

    def advance(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

    def record(self, record: Record) -> None:
        if record["kind"] == "step" and self._task is not None:
            figures = f"loss {record['loss']:.3f}  {record['images_per_second']:,.0f} images/s"
            self._progress.update(self._task, figures=figures)
        super().record(record)

    def _end_task(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def close(self) -> None:
        self._end_task()
        self._progress.stop()


def build_console() -> Tracker:
    """A bar if standard output is a terminal, else plain lines."""
    return TerminalConsole(Console()) if sys.stdout.isatty() else PlainConsole()


def describe(record: Record) -> str:
    """An epoch's record as one line."""
    figures = f"loss {record['loss']:7.4f}  top-1 {100 * record['top1']:6.2f} %  top-5 {100 * record['top5']:6.2f} %"
    rate = f"{record['images_per_second']:9,.0f} images/s"
    if record["split"] == "train":
        width = len(str(record["epochs"]))
        return (
            f"epoch {record['epoch']:{width}}/{record['epochs']}  train  {figures}  {rate}, "
            f"{record['epoch_seconds']:.1f} s, {100 * record['data_wait']:.0f} % waiting for data"
        )
    indent = " " * (7 + 2 * len(str(record["epochs"])))
    return f"{indent}  val    {figures}  {rate}, {record['samples']:,} images"
