"""What is wrong with a command's arguments, in one line, as for all other errors; tyro would draw a box."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any

from lockstep.config.legacy_flags import flags_of
from lockstep.errors import ConfigError

events: Any = None
with suppress(ImportError):  # not part of tyro's stable interface; without it, tyro prints its box
    from tyro import _errors as events

# What tyro says of a value that no type takes, and what is wanted instead.
_WRONG_TYPE = {
    r"invalid literal for int\(\) with base 10: '(.*)'": "a whole number",
    r"could not convert string to float: '(.*)'": "a number",
    r"no type matching (?s:.*?) could be instantiated from \['([^\n]*)'\]": "",
}


@contextmanager
def raised(kind: type) -> Iterator[None]:
    """Have tyro raise what is wrong with the arguments for the dataclass `kind` as a ConfigError."""
    if events is None:
        yield
        return

    def refuse(event: Any) -> None:
        describe = _DESCRIPTIONS.get(type(event).__name__)
        if describe:  # else tyro prints it
            raise ConfigError(describe(event, flags_of(kind).names))

    with events.on_parse_error(refuse):
        yield


def _unknown(event: Any, names: Mapping[str, str]) -> str:
    word = event.tokens[0].partition("=")[0]
    near = get_close_matches(word, names, n=1, cutoff=0.7)
    return f"{word}: unknown argument; {f'did you mean {near[0]}?' if near else _see_help(event)}"


def _missing(event: Any, names: Mapping[str, str]) -> str:
    missing = (_name(each.arg, names) or _metavar(each.arg) for each in event.missing_arguments)
    return f"{', '.join(missing)} is missing; {_see_help(event)}"


def _without_value(event: Any, names: Mapping[str, str]) -> str:
    return f"{_name(event.argument, names)} needs a value: {_metavar(event.argument)}"


def _no_choice(event: Any, names: Mapping[str, str]) -> str:
    near = get_close_matches(event.value, event.choices, n=1)
    *others, last = event.choices
    wanted = f"{', '.join(others)} or {last}" if others else last
    return _must_be(event.argument, names, event.value, wanted) + (f"; did you mean {near[0]}?" if near else "")


def _wrong(event: Any, names: Mapping[str, str]) -> str:
    message, argument = str(event.message), event.argument
    if argument is None or message.startswith("-"):
        return message
    for pattern, wanted in _WRONG_TYPE.items():
        if found := re.match(pattern, message):
            return _must_be(argument, names, found[1], wanted or _metavar(argument))
    return f"{_name(argument, names)}: {message}"


_DESCRIPTIONS: dict[str, Callable[[Any, Mapping[str, str]], str]] = {
    "UnrecognizedArgs": _unknown,
    "MissingArgs": _missing,
    "BadValue": _without_value,
    "InvalidChoice": _no_choice,
    "InstantiationFailure": _wrong,
}


def _must_be(argument: Any, names: Mapping[str, str], value: str, wanted: str) -> str:
    return f"{_name(argument, names)} {value}: must be {wanted}".lstrip()


def _name(argument: Any, names: Mapping[str, str]) -> str:
    """The long name of a flag; empty for a positional argument."""
    first = argument.lowered.name_or_flags[0]
    return names.get(first, first) if first.startswith("-") else ""


def _metavar(argument: Any) -> str:
    return re.sub(r"\{None\}\||[{}]", "", str(argument.lowered.metavar))


def _see_help(event: Any) -> str:
    return f"`{event.prog} --help` lists the arguments"
