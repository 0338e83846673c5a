"""`lockstep study`: measure where a job's time goes, with one module per study, and what the studies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lockstep.cli import USAGE_ERROR, action_of
from lockstep.cli.json_output import json_only
from lockstep.cli.parse import parse_train
from lockstep.cli.run import split
from lockstep.cli.script import split_at_dashes
from lockstep.config.schema import TrainConfig
from lockstep.data import catalog
from lockstep.errors import INTERRUPTED, ConfigError, require
from lockstep.launch.plan.options import LaunchOptions
from lockstep.report.scaling_series import MAX_WORKERS

TO_GO_ON = "to measure the rest, run the same command again"
STUDIES = {
    "scaling": "throughput and time per step on different numbers of workers",
    "predict": "throughput on more workers than were measured",
    "batch": "throughput and memory by batch size, and the largest that fits",
    "loading": "images per second of each stage of data loading",
}


def main(arguments: Sequence[str]) -> int:
    about = "Measure a job. Results are printed; measurements are appended to study/STUDY.jsonl."
    name = action_of(arguments, "study", "study", "Studies", about, STUDIES)
    if name is None:
        return 0 if arguments else USAGE_ERROR
    own = (split if name in ("scaling", "batch") else split_at_dashes)(arguments[1:])[0]
    with json_only("--json" in own):
        code: int = import_module(f"lockstep.cli.study.{name}").main(arguments[1:])
    return code


def until_interrupted(study: Callable[[], int]) -> int:
    """Run a study and return its exit code; on Ctrl-C between two jobs, print how to continue.

    During a job, its launcher handles Ctrl-C.
    """
    try:
        return study()
    except KeyboardInterrupt:
        print(f"\n{TO_GO_ON}")
        return INTERRUPTED


def read_job(arguments: Sequence[str]) -> TrainConfig:
    """Parse the training job in the arguments after `--`, which are not a command.

    Raises:
        ConfigError: An argument is invalid, or is a launch flag, which must come before `--`.
    """
    if not arguments:
        raise ConfigError("missing the job to measure; add its `lockstep train` arguments at the end: -- digits")
    if any(word.endswith(".py") for word in arguments):
        raise ConfigError(f"{arguments[0]}: command not found; to measure a script, write: -- python train.py")
    train = parse_train(arguments)
    if train.workers is not None or train.where != LaunchOptions():
        raise ConfigError("put -np, -H and other launch flags before the --")
    if train.job.run.resume or train.job.run.evaluate:
        raise ConfigError("a study only measures steps and saves no weights; remove --resume and --evaluate")
    catalog.check(train.job.data)
    return train.job


def train_command(where: LaunchOptions, flags: Sequence[str]) -> list[str]:
    """Return the command of a training job's workers."""
    return [where.python_of_workers, "-m", "lockstep", "train", *flags]


def empty_table(title: str, headings: Iterable[str], narrow: bool = False) -> Table:
    """Return a table with right-aligned columns; with `narrow`, one for many columns."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    if narrow:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def parse_counts(flag: str, text: str) -> list[int]:
    """Parse numbers of workers, separated by commas or spaces.

    Raises:
        ConfigError: There is none, or one is not an integer from 1 to MAX_WORKERS.
    """
    numbers = text.replace(",", " ").split()
    is_valid = all(number.isdecimal() and len(number) <= 8 and 1 <= int(number) <= MAX_WORKERS for number in numbers)
    require(is_valid and numbers != [], flag, text or "''", "numbers of workers, such as 1,2,4")
    return [int(number) for number in numbers]


def show_number(value: float) -> str:
    """Format a number with three significant digits, or without decimals from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
