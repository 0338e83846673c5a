"""Derive a command's flags from its dataclass: each field is a flag, and the string below it is its help text.

`Annotated[int, arg(aliases=["-b"])]` adds names or a metavar to a flag; `Positional[str]` is a positional argument.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")
Positional = Annotated[T, "positional"]
PLAIN = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "{True,False}"}


@dataclass(frozen=True)
class Spelling:
    """The name, aliases and metavar of a flag that override those derived from its field; "" or () to keep them."""

    name: str
    aliases: tuple[str, ...]
    metavar: str


def arg(name: str = "", aliases: Sequence[str] = (), metavar: str = "") -> Spelling:
    """Annotate a field with the name, aliases or metavar of its flag."""
    return Spelling(name, tuple(aliases), metavar)


@dataclass(frozen=True)
class Flag:
    """One flag or positional argument of a command."""

    group: type
    """The dataclass that contains the field."""
    path: tuple[str, ...]
    """The names of the fields from the command to this one."""
    names: tuple[str, ...]
    """The long name, then its aliases; empty for a positional argument."""
    metavar: str
    kinds: tuple[Any, ...]
    """The types of one value: int, float, str, Path, bool, NoneType or a Literal."""
    is_many: bool
    default: Any
    """The field's default; MISSING if the argument is required."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """The values by name, for a flag without a value, such as {"--quiet": True, "--no-quiet": False}."""
    count: int = 0
    """With `is_many`: the number of values of one occurrence, to which others add; 0: any, and the last one wins."""
    text: str = ""
    """The help text. Default: the string below the field."""

    @property
    def is_positional(self) -> bool:
        return not self.names

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return bool(self.switches)

    @property
    def opposite(self) -> str:
        return f"--no-{self.names[0].removeprefix('--')}"

    @property
    def choices(self) -> tuple[Any, ...]:
        return tuple(
            choice for kind in self.kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)
        )

    @property
    def help(self) -> str:
        return self.text or help_texts(self.group)[self.path[-1]]


@cache
def flags_of(command: type) -> tuple[Flag, ...]:
    """Return all flags of a command, including those of nested dataclasses, in the order of the fields."""
    return tuple(_flags(command, ()))


@cache
def groups_of(command: type) -> tuple[type, ...]:
    """Return the dataclass and the dataclasses nested in it, in the order of the fields."""
    hints = (hint for hint, _ in _fields(command).values())
    inner = (group for hint in hints if dataclasses.is_dataclass(hint) for group in groups_of(typing.cast(type, hint)))
    return (command, *inner)


def _flags(group: type, path: tuple[str, ...]) -> Iterator[Flag]:
    for item in dataclasses.fields(group):
        hint, extras = _fields(group)[item.name]
        here = (*path, item.name)
        if dataclasses.is_dataclass(hint):
            yield from _flags(typing.cast(type, hint), here)
            continue
        spelling = next((extra for extra in extras if isinstance(extra, Spelling)), arg())
        long = f"--{(spelling.name or item.name).replace('_', '-')}"
        is_many = typing.get_origin(hint) is tuple
        value = typing.get_args(hint)[0] if is_many else hint
        kinds = typing.get_args(value) if typing.get_origin(value) in (typing.Union, UnionType) else (value,)
        names = () if "positional" in extras else (long, *spelling.aliases)
        metavar = spelling.metavar or ("" if kinds == (bool,) else _metavar(kinds))
        switches = {**dict.fromkeys(names, True), f"--no-{long.removeprefix('--')}": False} if kinds == (bool,) else {}
        yield Flag(group, here, names, metavar, kinds, is_many, item.default, switches)


@cache
def _fields(group: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type and the annotations of each field, by name."""
    hints = typing.get_type_hints(group, include_extras=True)
    return {
        name: (typing.get_args(hint)[0], hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())
        for name, hint in hints.items()
    }


def _metavar(kinds: tuple[Any, ...]) -> str:
    """Return the placeholder of a value: its type, or its choices in braces."""
    plain = [PLAIN[kind] for kind in kinds if kind in PLAIN]
    choices = [
        str(choice) for kind in kinds if kind not in PLAIN and kind is not NoneType for choice in typing.get_args(kind)
    ]
    return "|".join([*plain, *choices]) if plain else f"{{{','.join(choices)}}}"


@cache
def help_texts(group: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, on one line, by name; "" for fields without one."""
    tree = ast.parse(inspect.getsource(sys.modules[group.__module__]))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == group.__name__]
    texts = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            texts[node.target.id] = " ".join(ast.literal_eval(after.value).split()) if is_text else ""  # type: ignore
    return texts
