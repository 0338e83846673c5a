"""Help pages: usage, flags in groups and examples, wrapped to the terminal's width."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING
from functools import reduce
from typing import Any

from lockstep.config import schema
from lockstep.config.flags import Flag, flags_of, groups_of
from lockstep.launch.plan.batch_script import BatchJob
from lockstep.launch.plan.containers import ContainerOptions
from lockstep.launch.plan.options import LaunchOptions, RestartOptions
from lockstep.launch.staging.stage_options import StageOptions

TITLES: dict[type, str] = {
    schema.TrainConfig: "Training",
    schema.DataConfig: "Data",
    schema.AugmentConfig: "Augmentation",
    schema.ModelConfig: "Model",
    schema.OptimConfig: "Optimizer",
    schema.ParallelConfig: "Parallelism",
    schema.NumericsConfig: "Precision",
    schema.RunConfig: "Output",
    BatchJob: "Job",
    LaunchOptions: "Hosts",
    ContainerOptions: "Containers and copies",
    StageOptions: "Containers and copies",
    RestartOptions: "Restarts",
}
# Flags of job launches for few users, or for manually started nodes: only --help-all shows them.
RARE = (
    *("--nodes", "--node-rank", "--master-addr", "--master-port", "--dist-url", "--world-size", "--rank"),
    *("--start-timeout", "--stop-timeout", "--elastic-timeout", "--stage-dir"),
)
# A recipe may turn these switches on or off, so their help shows both forms: --[no-]NAME.
SETTINGS = (
    schema.DataConfig,
    schema.AugmentConfig,
    schema.ModelConfig,
    schema.OptimConfig,
    schema.ParallelConfig,
    schema.NumericsConfig,
)
# The end of the usage line, after the flags.
TAILS = {
    "run": "-- COMMAND ...",
    "check": "-- COMMAND ...",
    "script": "-- COMMAND ...",
    "study scaling": "-- TRAINING FLAGS | COMMAND",
    "study batch": "-- TRAINING FLAGS | COMMAND",
    "study loading": "-- TRAINING FLAGS",
}
WIDEST = 120  # columns; longer lines are hard to read
NARROWEST = 40
WIDEST_TERM = 26
EXAMPLES = "Examples:\n"
Rows = Mapping[str, str]  # from a term, such as "-b, --batch-size INT", to its description


def explain(kind: type, command: str, values: Any, shows_all: bool) -> str:
    """Return the help page of a command.

    Args:
        kind: The command's dataclass. If it has `common` (a mapping from titles to flags), only those flags are shown.
        values: An instance with the defaults to show. Default: the defaults of the fields.
        shows_all: Show all flags, even if there are common ones.
    """
    flags = flags_of(kind)
    common: Mapping[str, str] | None = None if shows_all else getattr(kind, "common", None)
    if common:
        by_name = {name: flag for flag in flags for name in flag.names or [flag.metavar]}
        groups = {title: [by_name[name] for name in names.split()] for title, names in common.items()}
    else:
        groups = {"Arguments": [flag for flag in flags if flag.is_positional]}
        for group in groups_of(kind):
            own = [flag for flag in flags if flag.group is group and not flag.is_positional]
            if group in (LaunchOptions, StageOptions, RestartOptions) and not shows_all:
                own = [flag for flag in own if not {*flag.names} & {*RARE}]
            groups.setdefault(TITLES.get(group, "Flags"), []).extend(own)
    sections = {
        title: {term(flag, all_names=not common): text_of(flag, values) for flag in group}
        for title, group in groups.items()
    }
    count = sum(not flag.is_positional for flag in flags)
    shown = sum(not flag.is_positional for group in groups.values() for flag in group)
    more = f"`lockstep {command} --help-all` shows all {count} flags." if shown < count else ""
    return page(usage(kind, command), (kind.__doc__ or ""), sections, more)


def page(usage_line: str, about: str, sections: Mapping[str, Rows], more: str = "") -> str:
    """Return a help page: the text of `about`, the non-empty sections, the examples of `about`, then `more`."""
    width = max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST)) - 1
    paragraphs = inspect.cleandoc(about).split("\n\n")
    prose = [" ".join(part.split()) for part in paragraphs if not part.startswith(EXAMPLES)]
    examples = [part.removeprefix(EXAMPLES) for part in paragraphs if part.startswith(EXAMPLES)]
    shown = {title: rows for title, rows in sections.items() if rows}
    column = 4 + max((len(each) for rows in shown.values() for each in rows if len(each) <= WIDEST_TERM), default=0)
    synopsis = textwrap.fill(f"usage: {usage_line}", width, subsequent_indent="  ", break_on_hyphens=False)
    parts = [synopsis.replace("usage:", _bold("usage:"), 1), *(textwrap.fill(part, width) for part in prose if part)]
    for title, rows in shown.items():
        parts.append("\n".join([_bold(title), *(_row(*row, column, width) for row in rows.items())]))
    parts += [f"{_bold('Examples')}\n{textwrap.indent(textwrap.dedent(part), '  ')}" for part in examples]
    return "\n\n".join([*parts, *([textwrap.fill(more, width)] if more else [])])


def usage(kind: type, command: str) -> str:
    """Return a command's synopsis, such as "lockstep eval CHECKPOINT [flags]"."""
    flags = flags_of(kind)
    arguments = ["lockstep", command]
    for flag in flags:
        if flag.is_positional:
            name = flag.metavar + " ..." * flag.is_many
            arguments.append(name if flag.default is MISSING else f"[{name}]")
    arguments += ["[flags]"] * any(flag.names for flag in flags)
    return " ".join([*arguments, *TAILS.get(command, "").split()])


def is_two_way(flag: Flag) -> bool:
    """Return whether to show both forms of a switch; otherwise only the one that changes its default is shown."""
    return flag.is_switch and flag.group in SETTINGS


def names_of(flag: Flag) -> list[str]:
    """Return a flag's names as shown, short ones first."""
    if is_two_way(flag):
        return [f"--[no-]{flag.names[0].removeprefix('--')}"]
    if flag.is_switch and flag.default:
        return [flag.opposite]
    same = [f"-{name}" for name in flag.names if not name.startswith("--")]  # omits --np, because -np is shown
    names = [name for name in flag.names if name not in same]
    return sorted(names, key=lambda name: name.startswith("--"))


def term(flag: Flag, all_names: bool) -> str:
    """Return a flag with its metavar, such as "-b, --batch-size INT", without aliases unless `all_names`."""
    names = names_of(flag)
    if not all_names:
        names = [name for name in names if name == flag.names[0] or not name.startswith("--")][:2] or names
    return f"{', '.join(names)} {flag.metavar}".strip() + " ..." * flag.is_many


def text_of(flag: Flag, values: Any) -> str:
    """Return a flag's help with its default: that of `values`, or else the help text after "Default:"."""
    about, _, usual = flag.help.partition(" Default: ")
    value = flag.default if values is None else reduce(getattr, flag.path, values)
    default = show_value(flag, value) or usual.rstrip(".")
    return about.rstrip(".") + (f" (default: {default})" if default else "")


def show_value(flag: Flag, value: Any) -> str:
    """Return a default as typed on the command line; "" if there is none to show."""
    if flag.is_switch:
        return ("off", "on")[bool(value)] if is_two_way(flag) else ""
    if value in (None, "", ()) or value is MISSING:
        return ""
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _row(name: str, text: str, column: int, width: int) -> str:
    """Return a term with its description next to it, or below it if the term is long."""
    shown = f"  {name}"
    glued = text.replace("(default: ", "(default:\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(glued, max(20, width - column), break_on_hyphens=False) or [""]
    if len(shown) + 2 > column:
        lines = ["", *lines]
    first, *others = lines
    row = "\n".join([f"{shown:{column}}{first}".rstrip(), *(" " * column + line for line in others)])
    return row.replace("\N{NO-BREAK SPACE}", " ")


def _bold(text: str) -> str:
    is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if is_plain else f"\033[1m{text}\033[0m"
