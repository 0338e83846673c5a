"""Import the user-defined functions that flags name as MODULE:FUNCTION."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lockstep.errors import ConfigError


def resolve(flag: str, reference: str) -> Callable[..., Any]:
    """Import the function that `reference` names; the current folder is searched for modules, too.

    Raises:
        ConfigError: The module or the function does not exist; the message names `flag`.
    """
    module_name, _, name = reference.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{flag} {reference}: must be MODULE:FUNCTION, such as mypackage.train:build")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{flag} {reference}: no module {error.name!r} in the current folder or the environment"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{flag} {reference}: module {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]
