"""What the studies of a job's steps have in common on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lockstep.cli.parse import parse_train
from lockstep.config.schema import TrainConfig
from lockstep.errors import INTERRUPTED, ConfigError
from lockstep.launch.plan.options import LaunchOptions

if TYPE_CHECKING:
    from rich.table import Table

TO_GO_ON = "to measure the rest, run the same command again"


def until_interrupted(study: Callable[[], int]) -> int:
    """Do a study; its exit code. Ctrl-C between two jobs, whose launcher would have taken it, ends it with a hint."""
    try:
        return study()
    except KeyboardInterrupt:
        print(f"\n{TO_GO_ON}")
        return INTERRUPTED


def read_job(arguments: Sequence[str]) -> TrainConfig:
    """The training job that the words after `--` describe.

    Raises:
        ConfigError: They say where the job runs, which is the study's to decide, or are wrong.
    """
    if not arguments:
        raise ConfigError("missing the job to measure; add its arguments of `lockstep train` last: -- digits")
    train = parse_train(arguments)
    if train.workers is not None or train.where != LaunchOptions():
        raise ConfigError("put -np, -H and other launch flags before the --")
    if train.job.run.resume or train.job.run.evaluate:
        raise ConfigError("a study measures steps and keeps no weights: leave --resume and --evaluate out")
    from lockstep.data import catalog

    catalog.check(train.job.data)
    return train.job


def empty_table(title: str, headings: Iterable[str]) -> Table:
    """A table of right-aligned columns."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def show_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
