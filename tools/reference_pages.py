"""Generate docs/reference/command-line and docs/reference/recipes.md from the parsers, dataclasses and YAML files.

    python tools/reference_pages.py

tests/docs/test_reference.py checks that the committed pages are up to date, and that `--help-all` has the same flags.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.cli import COMMANDS
from lockstep.cli.data import ACTIONS
from lockstep.cli.help import TITLES, names_of, sentence_case, show_value, usage
from lockstep.cli.study import STUDIES
from lockstep.config import recipes
from lockstep.config.flags import Flag, flags_of, groups_of
from lockstep.config.legacy_flags import BARE, FIXED, REFUSED, RENAMED
from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.data.catalog import NAMED
from lockstep.files.untrusted import parse_yaml
from lockstep.launch.plan.horovodrun_plan import GROUPS, NO_EFFECT, HorovodFlag
from lockstep.launch.plan.options import LaunchOptions, RestartOptions

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NOTICE = "<!-- tools/reference_pages.py writes this page from the source; a test compares. -->"
# Groups of flags that several commands share, on a separate page.
SHARED = (LaunchOptions, RestartOptions)
NESTED = {"data": ACTIONS, "study": STUDIES}


def entry(flag: Flag, default: str) -> str:
    """Format a flag as an entry of a definition list."""
    return f"{term(flag)}\n:   {' '.join(part for part in (prose(flag.help), default) if part)}\n"


def term(flag: Flag) -> str:
    """Return a flag's names and values as Markdown."""
    value = flag.metavar + " ..." * flag.is_many
    if flag.is_positional:
        return f"`{value}`"
    return ", ".join(f"`{name}`" for name in names_of(flag)) + (f" `{value}`" if value else "")


def default_of(flag: Flag) -> str:
    """Return a sentence on the flag's default, or "" if the help text states it or there is none."""
    if flag.default is dataclasses.MISSING:
        return "Required."
    value = show_value(flag, flag.default)
    return f"Default: `{value}`." if value else ""


def prose(text: str) -> str:
    """Convert a help text to Markdown: flags become code, and nothing else is markup."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"(?<!\w)'([^']+)'(?!\w)", r"`\1`", text))
    for index in range(0, len(parts), 2):
        plain = parts[index].replace("[", "\\[").replace("<", "&lt;").replace("*", "\\*")
        parts[index] = re.sub(r"(?<![\w-])--?[a-zA-Z](?:[\w-]*\w)?(?![\w-])", lambda flag: f"`{flag[0]}`", plain)
    return "".join(parts)


def command_line_pages() -> dict[str, Callable[[], str]]:
    """Return the functions that write the pages of the command line, by path: an index, and one page per command."""
    pages = {name: partial(_command_page, name) for name in COMMANDS}
    return {
        "command-line/index.md": _index,
        **{f"command-line/{name}.md": page for name, page in pages.items()},
        "command-line/hosts-and-restarts.md": _shared_page,
        "command-line/horovodrun.md": _horovodrun,
        "command-line/older-flags.md": _older_flags,
    }


def _index() -> str:
    rows = [f"| [lockstep {name}]({name}.md) | {_sentence(about)} |" for name, about in COMMANDS.items()]
    return f"{INDEX_HEAD}\n| command | |\n|---|---|\n" + "\n".join(rows) + f"\n{INDEX_TAIL}"


def _command_page(name: str) -> str:
    if name not in NESTED:
        return _command(name, "#")
    parts = [f"# lockstep {name}\n", f"{NOTICE}\n", f"{_sentence(COMMANDS[name])}\n"]
    return "\n".join([*parts, *(_command(f"{name} {action}", "##") for action in NESTED[name])])


def _sentence(text: str) -> str:
    return f"{sentence_case(text)}."


def dataclass_of(name: str) -> Any:
    """Return the dataclass of a command's arguments."""
    command, _, action = name.partition(" ")
    if command == "data":
        return getattr(import_module("lockstep.cli.data"), f"{action.capitalize()}Command")
    module = import_module("lockstep.cli.parse" if name == "train" else f"lockstep.cli.{name.replace(' ', '.')}")
    own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    (kind,) = [each for each in own if each.__name__.endswith("Command")]
    return kind


def _command(name: str, level: str) -> str:
    kind = dataclass_of(name)
    about, *others = _paragraphs(kind)
    notice = [f"{NOTICE}\n"] if level == "#" else []
    parts = [f"{level} lockstep {name}\n", *notice, f"{about}\n", f"```text\n{usage(kind, name)}\n```\n", *others]
    flags = flags_of(kind)
    for group in groups_of(kind):
        own = [flag for flag in flags if flag.group is group and group not in SHARED]
        if group is not kind and own and (heading := f"{level}# {TITLES[group]}\n") not in parts:
            parts.append(heading)
        of_recipes = name == "train"
        parts += [entry(flag, _default_by_recipe(flag) if of_recipes else default_of(flag)) for flag in own]
    linked = [f"[{TITLES[group].lower()}](hosts-and-restarts.md#{TITLES[group].lower()})" for group in SHARED]
    linked = [link for link, group in zip(linked, SHARED, strict=True) if group in groups_of(kind)]
    if linked:
        parts.append(f"Further flags: {' and '.join(linked)}.\n")
    return "\n".join(parts)


def _default_by_recipe(flag: Flag) -> str:
    """Return a sentence on a flag's default; if recipes set it, with the value for the digits."""
    names = [recipes.for_source("digits"), *recipes.names()]
    instances = [TrainConfig(), *map(recipes.load, names)]
    if flag.is_positional or flag.group not in groups_of(TrainConfig):
        return default_of(flag)
    source, of_digits, *values = (_value_in(config, flag) for config in instances)
    if all(value == source for value in values):
        return default_of(flag)
    shown = show_value(flag, of_digits)
    return f"Default: by [recipe](../recipes.md); digits: {f'`{shown}`' if shown else 'none'}."


def _value_in(config: TrainConfig, flag: Flag) -> Any:
    """Return the value of a flag of `lockstep train` in a configuration."""
    value: Any = config
    for name in flag.path[1:]:
        value = getattr(value, name)
    return value


def _paragraphs(kind: type) -> list[str]:
    """Return a docstring's paragraphs as Markdown; examples become a code block."""
    parts = []
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        title, _, lines = paragraph.partition("\n")
        if title == "Examples:":
            parts.append(f"<!-- not run: they need data or hosts -->\n```sh\n{inspect.cleandoc(lines)}\n```\n")
        else:
            parts.append(prose(" ".join(paragraph.split())) + "\n")
    return parts


def _shared_page() -> str:
    return "\n".join([f"# Hosts and restarts\n\n{NOTICE}\n", *map(_shared, SHARED)])


def _shared(kind: Any) -> str:
    users = [name for name in all_commands() if kind in groups_of(dataclass_of(name))]
    of = ", ".join(f"`lockstep {name}`" for name in users)
    flags = (entry(flag, default_of(flag)) for flag in flags_of(kind))
    return "\n".join([f"## {TITLES[kind]}\n", f"Flags of {of}.\n", *flags])


def all_commands() -> list[str]:
    plain = [name for name in COMMANDS if name not in NESTED]
    return [*plain, *(f"{name} {action}" for name, actions in NESTED.items() for action in actions)]


def _horovodrun() -> str:
    parts = [f"# horovodrun\n\n{NOTICE}\n", HOROVODRUN, "```text\nhorovodrun -np N [flags] COMMAND ...\n```\n"]
    for title, flags in GROUPS.items():
        if title != "Job":
            parts.append(f"## {title}\n")
        idle = [flag for flag in flags if flag.text == NO_EFFECT]
        acting = [flag for flag in flags if flag not in idle and not flag.name.startswith("help")]
        parts += [f"{_horovodrun_term(flag)}\n:   {prose(_sentence(flag.text))}\n" for flag in acting]
        if idle:
            parts.append("\n".join(map(_horovodrun_term, idle)) + "\n:   No effect.\n")
    return "\n".join(parts)


def _horovodrun_term(flag: HorovodFlag) -> str:
    names = dict.fromkeys([*flag.names, *flag.switches])
    return ", ".join(f"`{name}`" for name in names) + (f" `{flag.metavar}`" if flag.metavar else "")


def _older_flags() -> str:
    rows = [(f"`{flag} VALUE`", f"`{own} VALUE`") for flag, own in RENAMED.items()]
    rows += [(f"`{flag}`", f"`{' '.join(own)}`") for flag, own in FIXED.items()]
    rows += [(f"`{flag}` without a value", f"`{flag} {value}`") for flag, (value, _) in BARE.items()]
    table = "\n".join(f"| {flag} | {own} |" for flag, own in sorted(rows))
    refused = (f"`{flag}`\n:   {prose(_sentence(REFUSED[flag]))}\n" for flag in sorted(REFUSED))
    return "\n".join([OLDER_FLAGS, f"| flag | is read as |\n|---|---|\n{table}\n", "## Refused\n", *refused])


def recipes_page() -> str:
    """Return the page of all recipes."""
    return "\n".join([RECIPES_HEAD, *map(_recipe, recipes.names())])


def _recipe(name: str) -> str:
    text = (recipes.FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    first = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    later = [line for line in lines[len(first) :] if line.startswith("#")]
    sources = [f"`lockstep train {source}`" for source in NAMED if recipes.for_source(source) == name]
    if name == recipes.for_source("FOLDER"):
        sources.append("`lockstep train FOLDER`")
    usual = "Used by " + ", ".join(sources) if sources else f"Used only with `--config {name}`"
    values = [
        (path, value)
        for (path, value), (_, default) in zip(_flat(recipes.load(name)), _flat(TrainConfig()), strict=True)
        if value != default
    ]
    parts = [f"### {name}\n", f"{_comment(first)}\n", f"{usual}.\n", f"```yaml\n{_nested(values)}```\n"]
    if special := _special(name, parse_yaml(text).get("for_arch", {})):
        changes = (
            f"`{archs}`: " + ", ".join(f"`{path}` {_yaml(value)}" for path, value in fields.items()) + "."
            for archs, fields in special.items()
        )
        parts.append(" ".join(["For some networks (`for_arch`):", *changes, _comment(later)]) + "\n")
    return "\n".join(parts)


def _nested(values: Iterable[tuple[str, Any]]) -> str:
    """Format the fields as YAML, as in a recipe."""
    lines, last = [], ""
    for path, value in values:
        group, _, field = path.rpartition(".")
        if group and group != last:
            lines.append(f"{group}:\n")
        lines.append(f"{'  ' * bool(group)}{field}: {_yaml(value)}\n")
        last = group
    return "".join(lines)


def _comment(lines: list[str]) -> str:
    return prose(" ".join(line.removeprefix("#").strip() for line in lines))


def _special(name: str, archs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a recipe's changes for some networks, by name; networks with equal changes are joined."""
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


INDEX_HEAD = f"""# The command line

{NOTICE}

`--help` (`-h`) after a command prints the flags that most people need; `--help-all` prints all of them.
`lockstep --version` prints the version.
"""
INDEX_TAIL = """
[Hosts and restarts](hosts-and-restarts.md) lists the flags that several commands share. The distribution
`lockstep-horovod` has the command [horovodrun](horovodrun.md).

`--[no-]flip` stands for two flags, `--flip` and `--no-flip`. `{A,B}` is a choice of values, and `A ...` takes several
values. If a flag is given twice, the last one counts. `lockstep train` also accepts
[flags of older scripts](older-flags.md).
"""
HOROVODRUN = """Start a command on N workers, for scripts that use Horovod's API. It is part of the distribution
`lockstep-horovod`. Flags without effect are accepted, so that old command lines run; each prints a line with the
reason. [Horovod's API](../horovod.md#elastic-jobs) explains elastic jobs.
"""
OLDER_FLAGS = f"""# Flags of older scripts

{NOTICE}

`lockstep train` accepts flags of older ImageNet, CIFAR and MNIST scripts. [Older scripts](../../howto/old-scripts.md)
has whole command lines.

Flags may have underscores instead of hyphens. A flag that is on or off may be followed by true, false, yes, no, on,
off, 1 or 0. With `--dist-url`, `--world-size` and `--rank` count nodes.

## Translated
"""
RECIPES_HEAD = f"""# Recipes and configuration

{NOTICE}

A recipe is a YAML file with the configuration of a training job. `lockstep train` starts from the recipe of the data
set, or from `--config NAME` or `--config FILE.yaml`. Flags override it, and fields that it does not set have their
defaults. `--print-config` prints every field, which is a recipe, too:

```sh
lockstep train digits --lr 0.004 --print-config > mine.yaml
lockstep train --config mine.yaml --epochs 1 --print-config
```

A run stores it in its folder, as `config.yaml`. [`lockstep train`](command-line/train.md) explains each field by its
flag; arguments of `lockstep.train.fit` have the same names without the group, such as `lr=0.1`. The additional field
`for_arch` has values for some networks.

## The recipes

The fields that differ from the defaults.
"""
PAGES: dict[str, Callable[[], str]] = {**command_line_pages(), "recipes.md": recipes_page}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
