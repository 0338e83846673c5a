"""Progress for people: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lockstep.train.trackers.base import Record, Tracker, single_metrics


class PlainConsole(Tracker):
    """One line an epoch and split, and one every `every` steps within an epoch, as text."""

    def __init__(self, every: int):
        self._every = every
        self._where = ""

    def say(self, line: str) -> None:
        try:
            print(line, flush=True)
        except OSError as error:  # standard output is a file on a disk that is full; the log has the line
            if isinstance(error, BrokenPipeError):
                raise

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._where = f"epoch {epoch + 1:{len(str(epochs))}}/{epochs}"

    def record(self, record: Record) -> None:
        if record["kind"] == "epoch":
            self.say(describe(record))
        if record["kind"] == "step" and record["step"] % self._every == 0:  # others only end an epoch
            self.say(f"{self._where}  {describe_steps(record)}")


class TerminalConsole(Tracker):
    """One line an epoch and split, and below them a bar for the epoch that runs, with the newest figures."""

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
        if record["kind"] == "epoch":
            self.say(describe(record))

    def _end_task(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def close(self) -> None:
        self._end_task()
        self._progress.stop()


def build_console(log_every: int) -> Tracker:
    """A bar if standard output is a terminal, else plain lines, also one every `log_every` steps."""
    return TerminalConsole(Console()) if sys.stdout.isatty() else PlainConsole(log_every)


def _figures(record: Record) -> tuple[str, str]:
    loss, top1, top5 = record["loss"], 100 * record["top1"], 100 * record["top5"]
    shares = f"loss {loss:7.4f}  top-1 {top1:6.2f} %  top-5 {top5:6.2f} %"
    return shares, f"{record['images_per_second']:9,.0f} images/s"


def describe_steps(record: Record) -> str:
    """The record of some steps within an epoch as one line."""
    figures, rate = _figures(record)
    wait = f"{100 * record['data_wait']:.0f} % waiting for data"
    return f"step {record['step']:,}  {figures}  {rate}, lr {record['lr']:.4g}, {wait}"


def describe(record: Record) -> str:
    """An epoch's record as one line."""
    figures, rate = _figures(record)
    at_side = f", at {record['side']} pixels" if "side" in record else ""
    if record["split"] == "train":
        width = len(str(record["epochs"]))
        return (
            f"epoch {record['epoch']:{width}}/{record['epochs']}  train  {figures}  {rate}, "
            f"{record['epoch_seconds']:.1f} s, {100 * record['data_wait']:.0f} % waiting for data{at_side}"
        )
    indent = " " * (7 + 2 * len(str(record["epochs"])))
    metrics = "".join(f", {name} {value:.4g}" for name, value in single_metrics(record).items())
    return f"{indent}  val    {figures}  {rate}, {record['samples']:,} images{metrics}"
