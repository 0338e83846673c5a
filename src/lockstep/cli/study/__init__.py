"""`lockstep study`: measure where a job's time goes, with one module per study, and what the studies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.cli import HELP
from lockstep.cli.parse import parse_train
from lockstep.config.schema import TrainConfig
from lockstep.errors import INTERRUPTED, ConfigError
from lockstep.launch.plan.options import LaunchOptions

if TYPE_CHECKING:
    from rich.table import Table

TO_GO_ON = "to measure the rest, run the same command again"
STUDIES = {
    "scaling": "throughput and time per step on different numbers of workers",
    "predict": "throughput on more workers than were measured",
    "batch": "throughput and memory by batch size, and the largest that fits",
    "collectives": "latency and bandwidth by collective and message size",
    "loading": "images per second of each stage of data loading",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP:
        from lockstep.cli.help import page

        about = "Measure a job. Results are printed and appended to study/STUDY.jsonl."
        more = "`lockstep study STUDY --help` shows the flags of a study."
        print(page("lockstep study STUDY [arguments]", about, {"Studies": STUDIES}, more))
        return 0 if arguments else ConfigError.exit_code
    name, *rest = arguments
    if name not in STUDIES:
        near = get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean `lockstep study {near[0]}`?" if near else f"must be one of {', '.join(STUDIES)}"
        raise ConfigError(f"{name}: unknown study; {hint}")
    code: int = import_module(f"lockstep.cli.study.{name}").main(rest)
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
    """Parse the training job in the arguments after `--`.

    Raises:
        ConfigError: An argument is invalid, or is a launch flag, which must come before `--`.
    """
    if not arguments:
        raise ConfigError("missing the job to measure; add its `lockstep train` arguments at the end: -- digits")
    train = parse_train(arguments)
    if train.workers is not None or train.where != LaunchOptions():
        raise ConfigError("put -np, -H and other launch flags before the --")
    if train.job.run.resume or train.job.run.evaluate:
        raise ConfigError("a study only measures steps and saves no weights; remove --resume and --evaluate")
    from lockstep.data import catalog

    catalog.check(train.job.data)
    return train.job


def empty_table(title: str, headings: Iterable[str]) -> Table:
    """Return a table with right-aligned columns."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def show_number(value: float) -> str:
    """Format a number with three significant digits, or without decimals from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
