"""Write docs/reference/command-line.md and docs/reference/recipes.md from the parsers, dataclasses and YAML files.

    python tools/reference_pages.py

The words are those of the dataclasses themselves, and not of `--help`, whose form changes with tyro's version and the
terminal's width. tests/docs/test_reference.py checks that the committed pages are what this writes, and that `--help`
has the same flags.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

from tyro.conf import Positional

from lockstep import recipes
from lockstep.cli import COMMANDS
from lockstep.cli.data import ACTIONS
from lockstep.cli.study import STUDIES
from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.data.catalog import NAMED
from lockstep.files.untrusted import parse_yaml
from lockstep.launch.plan.horovodrun_flags import build_parser
from lockstep.launch.plan.options import LaunchOptions
from lockstep.launch.plan.restart_options import RestartOptions

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NOTICE = "<!-- tools/reference_pages.py writes this page from the source; a test compares. -->"
# What follows the flags, which no dataclass has.
TAILS = {
    "run": "-- COMMAND ...",
    "script": "-- COMMAND ...",
    "study scaling": "-- TRAIN'S FLAGS",
    "study batch": "-- TRAIN'S FLAGS",
}
# Groups of flags that several commands share, with where they are explained.
SHARED = {LaunchOptions: "Where a job runs", RestartOptions: "Restarts"}
POSITIONAL = typing.get_args(Positional[str])[1]
PLAIN = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", NoneType: "None"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag or positional word of a command."""

    names: tuple[str, ...]
    value: str
    default: str
    help: str
    path: str
    is_positional: bool


def flags_of(kind: Any) -> Iterator[Flag]:
    """The flags of a dataclass's own fields, without those of dataclasses in it."""
    hints, helps = typing.get_type_hints(kind, include_extras=True), help_texts(kind)
    for item in dataclasses.fields(kind):
        hint, extras = _unwrap(hints[item.name])
        if not dataclasses.is_dataclass(hint):
            yield _flag(item, hint, extras, helps[item.name])


def groups_of(kind: Any) -> list[Any]:
    """The dataclasses among a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    fields = (hints[item.name] for item in dataclasses.fields(kind))
    return [hint for hint in fields if dataclasses.is_dataclass(hint)]


def help_texts(kind: type) -> dict[str, str]:
    """The docstring under each field."""
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(inspect.getmodule(kind) or sys)).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    texts = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            texts[node.target.id] = " ".join(ast.literal_eval(after.value).split()) if is_text else ""  # type: ignore
    return texts


def _flag(item: dataclasses.Field[Any], hint: Any, extras: tuple[Any, ...], text: str) -> Flag:
    told: dict[str, Any] = {}
    for extra in extras:
        told |= {name: value for name in ("name", "metavar", "aliases") if (value := getattr(extra, name, None))}
    long = "--" + told.get("name", item.name).replace("_", "-")
    names = (long, *told.get("aliases", ()))
    if hint is bool:
        names = (*names, "--no-" + long.removeprefix("--"))
    value = "" if hint is bool else told.get("metavar") or _value(hint)
    if typing.get_origin(hint) is tuple and "..." not in value:
        value = f"{value} ..."
    return Flag(names, value, _default(item, hint, text), text, item.name, POSITIONAL in extras)


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    extras: tuple[Any, ...] = ()
    while typing.get_origin(hint) is typing.Annotated:
        hint, *more = typing.get_args(hint)
        extras += tuple(more)
    return hint, extras


def _value(hint: Any) -> str:
    """How a value of a type is written."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, options))
    if origin in (typing.Union, UnionType):
        kinds = [option for option in options if option is not NoneType or bool in options]
        return "|".join("True|False" if kind is bool else _value(kind) for kind in kinds)
    return _value(options[0]) if origin is tuple else PLAIN[hint]


def _default(item: dataclasses.Field[Any], hint: Any, text: str) -> str:
    """The words on a flag's default; empty where the help text has them, or where there is none to name."""
    value = item.default
    if value is dataclasses.MISSING:
        return "Required."
    if value in (None, "", ()) or "efault" in text:
        return ""
    if hint is bool:
        return f"Default: {'yes' if value else 'no'}."
    values = value if isinstance(value, tuple) else (value,)
    return f"Default: `{' '.join(f'{each:g}' if isinstance(each, float) else str(each) for each in values)}`."


def entry(flag: Flag, path: str = "") -> str:
    """A flag as an entry of a definition list; `path` is its place in a recipe, if that is to be told."""
    body = " ".join(part for part in (prose(flag.help), flag.default) if part)
    return f"`{path}`\n:   {term(flag)}. {body}\n" if path else f"{term(flag)}\n:   {body}\n"


def term(flag: Flag) -> str:
    """A flag's names and values."""
    if flag.is_positional:
        optional = re.fullmatch(r"\[([^][]*)\]", flag.value)
        return f"`{optional[1] if optional else flag.value}`"
    if len(flag.names) == 1 and flag.value:
        return f"`{flag.names[0]} {flag.value}`"
    return ", ".join(f"`{name}`" for name in flag.names) + (f" `{flag.value}`" if flag.value else "")


def prose(text: str) -> str:
    """A help text as Markdown: flags become code, and nothing else is markup."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"(?<!\w)'([^']+)'(?!\w)", r"`\1`", text))
    for index in range(0, len(parts), 2):
        plain = parts[index].replace("[", "\\[").replace("<", "&lt;").replace("*", "\\*")
        parts[index] = re.sub(r"(?<![\w-])--?[a-zA-Z](?:[\w-]*\w)?(?![\w-])", lambda flag: f"`{flag[0]}`", plain)
    return "".join(parts)


def command_line() -> str:
    """The page of all commands."""
    parts = [COMMAND_LINE_HEAD]
    for name, about in COMMANDS.items():
        if name in ("data", "study"):
            actions = ACTIONS if name == "data" else STUDIES
            parts.append(f"## lockstep {name}\n\n{_sentence(about)}\n")
            parts += [_command(f"{name} {action}", "###") for action in actions]
        else:
            parts.append(_command(name, "##"))
    parts += [_shared(kind, title) for kind, title in SHARED.items()]
    return "\n".join([*parts, _horovodrun()])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def dataclass_of(name: str) -> Any:
    """The dataclass that a command's words are read into."""
    if name == "train":
        module = import_module("lockstep.cli.parse")
    else:
        module = import_module(f"lockstep.cli.{name.replace(' ', '.')}")
    own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    (kind,) = [each for each in own if each.__name__.endswith("Command")]
    return kind


def _command(name: str, level: str) -> str:
    kind = dataclass_of(name)
    flags = list(flags_of(kind))
    within = [group for group in groups_of(kind) if group not in SHARED]
    every = [*flags, *(flag for group in with_inner(within) for flag in flags_of(group))]
    words = [_positional(flag) for flag in every if flag.is_positional]
    has_flags = len(every) > len(words) or groups_of(kind)
    usage = " ".join(["lockstep", name, *words, *(["[flags]"] if has_flags else []), *TAILS.get(name, "").split()])
    parts = [f"{level} lockstep {name}\n", f"```text\n{usage}\n```\n"]
    parts += [prose(paragraph) + "\n" for paragraph in _paragraphs(kind)]
    parts += [entry(flag) for flag in flags]
    for group in with_inner(within):
        if name != "train" and group in _train_groups():
            continue
        title = f"Train: {_train_groups()[group]}" if group in _train_groups() else ""
        if title:
            parts += [f"{level}# {title}\n", f"{_about(group)}\n"]
        parts += [entry(_with_recipes(flag, group)) for flag in flags_of(group)]
    titles = SHARED | ({} if name == "train" else {group: f"Train: {of}" for group, of in _train_groups().items()})
    linked = [f"[{titles[group].lower()}](#{_slug(titles[group])})" for group in groups_of(kind) if group in titles]
    if linked:
        parts.append(f"Further flags: {' and '.join(linked)}.\n")
    return "\n".join(parts)


def _with_recipes(flag: Flag, group: Any) -> Flag:
    """The flag with the digits' default, if recipes set others than the source does."""
    name = _train_groups().get(group)
    path = flag.path if group is TrainConfig else f"{name}.{flag.path}"
    if name is None or flag.is_positional:
        return flag
    source, *values = (dict(_flat(config))[path] for config in (TrainConfig(), *map(recipes.load, recipes.names())))
    if all(value == source for value in values):
        return flag
    value = values[recipes.names().index("digits")]
    of_digits = "none" if value is None else f"`{_yaml(value)}`"
    if isinstance(value, bool):
        of_digits = "yes" if value else "no"
    return dataclasses.replace(flag, default=f"Default: by [recipe](recipes.md); digits: {of_digits}.")


def with_inner(groups: list[Any]) -> list[Any]:
    """The groups, each followed by those in it."""
    return [each for group in groups for each in (group, *with_inner(groups_of(group)))]


def _train_groups() -> dict[Any, str]:
    hints = typing.get_type_hints(TrainConfig)
    return {TrainConfig: "job"} | {kind: name for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def _positional(flag: Flag) -> str:
    return flag.value if flag.default == "Required." or flag.value.startswith("[") else f"[{flag.value}]"


def _paragraphs(kind: type) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n")]


def _about(kind: type) -> str:
    return prose(_paragraphs(kind)[0])


def _slug(title: str) -> str:
    return title.lower().replace(":", "").replace(" ", "-")


def _shared(kind: Any, title: str) -> str:
    users = [name for name in all_commands() if kind in groups_of(dataclass_of(name))]
    of = ", ".join(f"`lockstep {name}`" for name in users)
    return "\n".join([f"## {title}\n", f"{_about(kind)} Flags of {of}.\n", *map(entry, flags_of(kind))])


def all_commands() -> list[str]:
    plain = [name for name in COMMANDS if name not in ("data", "study")]
    return [*plain, *(f"data {action}" for action in ACTIONS), *(f"study {study}" for study in STUDIES)]


def _horovodrun() -> str:
    parser = build_parser()
    parts = ["## horovodrun\n", "```text\nhorovodrun -np N [flags] COMMAND ...\n```\n", HOROVODRUN]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
        if actions and group.title not in ("options", "optional arguments"):
            parts.append(f"### horovodrun: {group.title}\n")
        flags = [_argument(action) for action in actions]
        idle = [flag for flag in flags if flag.help == "No effect."]
        parts += [entry(flag) for flag in flags if flag not in idle]
        if idle:
            parts.append("\n".join(map(term, idle)) + "\n:   No effect.\n")
    return "\n".join(parts)


def _argument(action: argparse.Action) -> Flag:
    names, value = action.metavar or (), ""
    if action.nargs != 0:
        choices = "|".join(map(str, action.choices or ()))
        value = choices or (" ".join(names) if isinstance(names, tuple) else names)
    return Flag(tuple(action.option_strings), value, "", _sentence(action.help or ""), action.dest, False)


def recipes_page() -> str:
    """The page of all recipes, and of every field of a configuration."""
    parts = [RECIPES_HEAD, *map(_recipe, recipes.names()), FIELDS_HEAD]
    for kind, name in _train_groups().items():
        prefix = "" if kind is TrainConfig else f"{name}."
        title = "The job" if kind is TrainConfig else name
        parts += [f"### {title}\n", f"{_about(kind)}\n"]
        parts += [entry(flag, prefix + flag.path) for flag in flags_of(kind)]
    return "\n".join(parts)


def _recipe(name: str) -> str:
    text = (recipes.FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    first = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    later = [line for line in lines[len(first) :] if line.startswith("#")]
    sources = [f"`lockstep train {source}`" for source in NAMED if recipes.for_source(source) == name]
    if name == recipes.for_source("FOLDER"):
        sources.append("`lockstep train FOLDER`")
    usual = "Used by " + ", ".join(sources) if sources else f"Used by `--config {name}` alone"
    rows = [
        f"| `{path}` | {_yaml(value)} | {_yaml(default)} |"
        for (path, value), (_, default) in zip(_flat(recipes.load(name)), _flat(TrainConfig()), strict=True)
        if value != default
    ]
    parts = [f"### {name}\n", f"{_comment(first)}\n", f"{usual}.\n"]
    parts += ["| field | recipe | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"]
    if special := _special(name, parse_yaml(text).get("for_arch", {})):
        changes = (
            f"`{archs}`: " + ", ".join(f"`{path}` {_yaml(value)}" for path, value in fields.items()) + "."
            for archs, fields in special.items()
        )
        parts.append(" ".join(["For some networks (`for_arch`):", *changes, _comment(later)]) + "\n")
    return "\n".join(parts)


def _comment(lines: list[str]) -> str:
    return prose(" ".join(line.removeprefix("#").strip() for line in lines))


def _special(name: str, archs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the recipe changes for some networks; equal changes stand together."""
    common = dict(_flat(recipes.load(name)))
    changes: dict[str, dict[str, Any]] = {}
    for arch in archs:
        flat = {path: value for path, value in _flat(recipes.load(name, arch)) if value != common[path]}
        same = next((names for names, fields in changes.items() if fields == flat), None)
        if same is not None:
            changes[f"{same}`, `{arch}"] = changes.pop(same)
        else:
            changes[arch] = flat
    return changes


def _flat(config: TrainConfig) -> list[tuple[str, Any]]:
    def walk(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return list(walk(to_mapping(config), ""))


def _yaml(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(_yaml, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


COMMAND_LINE_HEAD = f"""# The command line

{NOTICE}

Every command of `lockstep`, then `horovodrun`, with each flag, the values it takes, its default and what it does.
`--help` (`-h`) after a command says the same in the terminal; `lockstep --version` prints the version.

A flag that is yes or no has two forms, such as `--flip` and `--no-flip`. `A|B` is a choice, `A ...` takes several
values, and where no default is named, nothing is set. `lockstep train` also takes the flags of older scripts
([old-scripts.md](../howto/old-scripts.md)).
"""
HOROVODRUN = """Start a command on N workers, for scripts of Horovod's API. It comes with the distribution
`lockstep-horovod`. Flags without effect are accepted so that old command lines run; each is answered by
a line that says why.
[horovod.md](horovod.md#elastic-jobs) says more on elastic jobs.
"""
RECIPES_HEAD = f"""# Recipes and configuration

{NOTICE}

A recipe is a complete configuration of a training job as a YAML file, in `src/lockstep/recipes`. `lockstep train`
begins with the recipe of its data set, or with the one that `--config NAME` or `--config FILE.yaml` names; flags
override it. What a recipe leaves out keeps its default. `--print-config` prints the outcome, which is a recipe too:

```sh
lockstep train digits --lr 0.004 --print-config > mine.yaml
lockstep train --config mine.yaml --epochs 1 --print-config
```

A run keeps the outcome in its folder as `config.yaml`. A recipe may have one field more, `for_arch`: values that differ
for some networks, by their names.

## The recipes

Each table has what differs from the defaults.
"""
FIELDS_HEAD = """## Every field

By its place in a recipe, with the flag of `lockstep train`, the values, and the default where no recipe sets it. The
same names without the group, such as `lr=0.1`, are the settings of `lockstep.train.fit`. An unknown field or a value of
the wrong type is an error (exit code 2) that names the nearest field, or the type.
"""
PAGES: dict[str, Callable[[], str]] = {"command-line.md": command_line, "recipes.md": recipes_page}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
