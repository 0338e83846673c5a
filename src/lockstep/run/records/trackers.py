"""Outputs for a run's records: metrics.jsonl, which is authoritative, and the console.

Only rank 0 has trackers, so no other code needs to check the rank. The console prints lines of at most 100 columns:
with a bar on a terminal, else plain text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.files.jsonl import format_record, keep_records
from lockstep.files.output import guarded, say
from lockstep.files.resilient_file import ResilientFile
from lockstep.run.records.run_folder import logger

Record = Mapping[str, Any]

# Levels of printed lines: only with --verbose, by default, and also with --quiet.
DETAIL, INFO, ALWAYS = 10, 20, 30

# Fields of step records and their usual names in TensorBoard.
_STEP_SCALARS = {
    "loss": "Loss/train",
    "top1": "Top1/train",
    "top5": "Top5/train",
    "images_per_second": "Throughput/train",
    "data_wait": "DataWait/train",
    "lr": "Lr",
}


class Tracker:
    """Receives records and lines from the training loop. The base class ignores them."""

    def say(self, line: str, level: int = INFO) -> None:
        """Print a line."""

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        """Start an epoch (0 is the first) of `steps` steps, of which `done` were taken before a resume."""

    def advance(self) -> None:
        """Note that a step was taken; its results may still be on the device."""

    def record(self, record: Record) -> None:
        """Store a record (see `lockstep.files.jsonl`)."""

    def unwritten(self) -> list[str]:
        """Write records that were kept in memory because the disk was full. Return the remaining problems."""
        return []

    def close(self) -> None:
        """End the run, successful or not."""


def scalars(record: Record) -> dict[str, float]:
    """Return a record's values under the names used in TensorBoard, MLflow and W&B; an own loop need not have all."""
    if record["kind"] not in ("step", "epoch"):
        return {}
    names, suffix = _STEP_SCALARS, "train"
    if record["kind"] == "epoch":
        split = record["split"]
        suffix = "train_epoch" if split == "train" else split
        names = {name.lower(): f"{name}/{suffix}" for name in ("Loss", "Top1", "Top5")}
        names |= {"epoch_seconds": f"Time/{split}", "images_per_second": f"Throughput/{suffix}"}
    figures = {tag: record[key] for key, tag in names.items() if key in record}
    return figures | {f"{name}/{suffix}": value for name, value in single_metrics(record).items()}


def single_metrics(record: Record) -> dict[str, float]:
    """Return the scalar metrics of `fit` in a record."""
    return {name: value for name, value in record.get("metrics", {}).items() if isinstance(value, float)}


class RecordTracker(Tracker):
    """Appends every record; while the disk is full, records wait in memory.

    A resumed run first removes the records that it will write again.

    Args:
        in_epoch: The run resumes within an epoch, so the record of the epoch's end is written again, too.
        warn: Called with a line to print when records cannot be written.
        confirm: Raises LockstepError if another job took over the run folder.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        start_step: int,
        in_epoch: bool = False,
        warn: Callable[[str], None] = logger.warning,
        confirm: Callable[[], None] = lambda: None,
    ):
        def keep(record: dict[str, Any]) -> bool:
            at_end = record.get("kind") == "epoch" and record.get("step") == start_step
            is_kept = 0 < record.get("step", 0) <= start_step and not (at_end and in_epoch)
            is_kept = is_kept or record.get("kind") in ("run", "generation", "energy")
            if is_kept:
                self._recorded.add(_identity(record))
            return is_kept

        # Of earlier sessions: a complete run that is resumed repeats its last evaluation.
        self._recorded: set[tuple[Any, ...]] = set()
        try:
            keep_records(path, keep)
            self._file = ResilientFile(path, warn, confirm)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error}; free disk space, or choose another folder (--run-dir)"
            ) from None

    def record(self, record: Record) -> None:
        if record["kind"] not in ("step", "epoch") or _identity(record) not in self._recorded:
            self._file.write(format_record(record))

    def unwritten(self) -> list[str]:
        return [problem for problem in (self._file.flush(),) if problem]

    def close(self) -> None:
        self._file.close()


def _identity(record: Record) -> tuple[Any, ...]:
    return record.get("kind"), record.get("step"), record.get("split")


COLUMNS = 100
FEW_CLASSES = 10  # up to this number, top-5 is not informative


class PlainConsole(Tracker):
    """Lines of text: two per epoch, for training and validation, and one every `log_every` steps.

    Epochs of at most `log_every` steps have a single line.

    Args:
        run: How often and how much to print.
        classes: Number of classes of the data set.
        noun: What its items are called.
    """

    def __init__(self, run: RunConfig, classes: int, noun: str = "images"):
        self._noun = noun
        self._every = run.log_every
        self._least = ALWAYS if run.quiet else DETAIL if run.verbose else INFO
        self._top5 = classes > FEW_CLASSES
        self._epoch = ""
        self._step_width = 0
        self._is_short = False
        self._train: Record | None = None  # of a short epoch, until it is evaluated

    def say(self, line: str, level: int = INFO) -> None:
        if level >= self._least:
            self._print(line)

    def _print(self, line: str) -> None:
        say(line, sys.stdout)  # the log has the line, too

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._epoch = f"epoch {epoch + 1:{len(str(epochs))}}/{epochs}"
        self._step_width = max(self._step_width, len(f"{epochs * steps:,}"))
        self._is_short = steps <= self._every

    def record(self, record: Record) -> None:
        if record["kind"] == "step" and record["step"] % self._every == 0:  # the others are ends of epochs
            self.say(describe_steps(self._epoch, record, self._step_width, self._noun), self._level_of_steps)
        if record["kind"] == "epoch" and record["split"] == "train" and self._is_short:
            self._train = record
        elif record["kind"] == "epoch":
            train, self._train = self._train, None
            form = self._top5, self._noun
            self.say(describe_both(train, record, *form) if train else describe(record, *form))

    @property
    def _level_of_steps(self) -> int:
        return DETAIL if self._is_short else INFO

    def close(self) -> None:
        if self._train:  # the run was stopped during the evaluation
            self.say(describe(self._train, self._top5, self._noun))


class TerminalConsole(PlainConsole):
    """Lines of epochs, and below them a bar for the current epoch with the latest values."""

    def __init__(self, run: RunConfig, classes: int, console: Console, noun: str = "images"):
        super().__init__(run, classes, noun)
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            refresh_per_second=4,  # the default of 10 per second costs 1 to 2 % of one core
        )
        self._task: TaskID | None = None

    @property
    def _level_of_steps(self) -> int:
        return DETAIL

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def begin_epoch(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        super().begin_epoch(epoch, epochs, steps, done)
        self._end_task()
        self._progress.start()
        self._task = self._progress.add_task(self._epoch, total=steps, completed=done, figures="")

    def advance(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

    def record(self, record: Record) -> None:
        if record["kind"] == "step" and self._task is not None:
            figures = f"loss {record['loss']:.3f}  {record['images_per_second']:,.0f} {self._noun}/s"
            self._progress.update(self._task, figures=figures)
        super().record(record)

    def _end_task(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def close(self) -> None:
        self._end_task()
        self._progress.stop()
        super().close()


def build_console(run: RunConfig, classes: int, noun: str) -> Tracker:
    """Build a console with a bar if stdout is a terminal and not --quiet, else a plain one."""
    if sys.stdout.isatty() and not run.quiet:
        return TerminalConsole(run, classes, Console(file=guarded(sys.stdout, drops=True)), noun)
    return PlainConsole(run, classes, noun)


def describe_steps(epoch: str, record: Record, width: int, noun: str = "images") -> str:
    """Format a record of steps as one line, with the step number in `width` columns."""
    return _fit(
        [
            epoch,
            f"step {record['step']:{width},}",
            *_figures(record, top5=False),
            _rate(record, noun),
            f"lr {record['lr']:.4g}",
            _wait(record),
        ]
    )


def describe(record: Record, top5: bool, noun: str = "images") -> str:
    """Format the record of an epoch's training or evaluation as one line."""
    epoch, figures = _epoch_of(record), [*_figures(record, top5), *_metrics(record), _rate(record, noun)]
    if record["split"] == "val":
        return _fit([" " * len(epoch), "val  ", *figures, f"{record['samples']:,} {noun}"])
    return _fit([epoch, "train", *figures, _seconds(record), _wait(record)])


def describe_both(train: Record, val: Record, top5: bool, noun: str = "images") -> str:
    """Format an epoch's training and evaluation as one line."""
    loss, *shares = _figures(val, top5)
    figures = [*_figures(train, top5=False), f"val {loss}", *shares, *_metrics(val)]
    return _fit([_epoch_of(val), *figures, _rate(train, noun), _seconds(train), _wait(train)])


def _epoch_of(record: Record) -> str:
    return f"epoch {record['epoch']:{len(str(record['epochs']))}}/{record['epochs']}"


def _figures(record: Record, top5: bool) -> list[str]:
    names = (("top-1", "top1"), ("top-5", "top5"))
    shares = [f"{name} {100 * record[key]:6.2f} %" for name, key in names if key in record]
    return [f"loss {record['loss']:.4f}", *shares[: 1 + top5]]


def _metrics(record: Record) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in single_metrics(record).items()]


def _rate(record: Record, noun: str) -> str:
    return f"{record['images_per_second']:7,.0f} {noun}/s"


def _seconds(record: Record) -> str:
    seconds = record["epoch_seconds"]
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _wait(record: Record) -> str:
    return f"wait {100 * record['data_wait']:.0f} %"


def _fit(parts: Sequence[str]) -> str:
    """Join as many of the first parts as fit into a line."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) > COLUMNS:
            break
        line += f"  {part}"
    return line
