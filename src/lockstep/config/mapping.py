"""Convert dataclasses to and from plain mappings, for YAML and JSON. Values are checked against the fields' types.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.errors import ConfigError

T = TypeVar("T")
_hints = cache(typing.get_type_hints)


def to_mapping(config: Any) -> dict[str, Any]:
    """Convert a dataclass to nested dictionaries, lists and scalars, for YAML or JSON."""
    result: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_mapping(value)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        result[item.name] = value
    return result


def from_mapping(cls: Callable[..., T], values: Any, origin: str, path: str = "") -> T:
    """Build a dataclass from a nested mapping as returned by `to_mapping`; missing fields keep their defaults.

    Args:
        origin: The source of the values, such as a file name, for messages.
        path: The position of `values` within the source, such as "data.", for messages.

    Raises:
        ConfigError: A key is unknown (the message names the closest field), or a value has the wrong type.
        TypeError: A field without a default is missing.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: {path.rstrip('.') or 'the file'} must be a mapping, not {values!r}")
    hints = _hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in hints:
            near = get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {path}{near[0]}?" if near else f"must be one of {', '.join(hints)}"
            raise ConfigError(f"{origin}: unknown field {path}{key}; {hint}")
        matches = list(_convert(value, hints[key], origin, f"{path}{key}"))
        if not matches:
            raise ConfigError(f"{origin}: {path}{key} is {value!r}, but must be {_describe(hints[key])}")
        arguments[key] = matches[0]
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _convert(value: Any, hint: Any, source: str, path: str) -> Iterator[Any]:
    """Yield `value` converted to each alternative of the type `hint` that it matches.

    Raises:
        ConfigError, TypeError: As `from_mapping` does for a dataclass in a tuple or a dictionary.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in options:
            with suppress(ConfigError, TypeError):
                yield from _convert(value, option, source, path)
    elif origin is Literal:
        if value in options:
            yield value
    elif origin is tuple:
        if isinstance(value, list):
            items = [list(_convert(item, options[0], source, f"{path}.{number}")) for number, item in enumerate(value)]
            if all(items):
                yield tuple(item[0] for item in items)
    elif origin is dict:
        if isinstance(value, dict):
            pairs = [
                (
                    list(_convert(key, options[0], source, path)),
                    list(_convert(each, options[1], source, f"{path}.{key}")),
                )
                for key, each in value.items()
            ]
            if all(key and each for key, each in pairs):
                yield {key[0]: each[0] for key, each in pairs}
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield from_mapping(hint, value, source, f"{path}.")
    elif hint is float:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                yield float(value)  # YAML 1.1 reads 1e-4, which has no decimal point, as a string
    elif hint is Path:
        if isinstance(value, str):
            yield Path(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        yield value


def _describe(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in options)
    if origin is Literal:
        return " or ".join(repr(option) for option in options)
    if origin is tuple:
        return f"a list of {_describe(options[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    return {
        type(None): "null",
        str: "a string",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
    }.get(hint, "a path")
