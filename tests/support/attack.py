"""An object whose pickle calls a function when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Attack:
    """Calls the function with the arguments when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call
