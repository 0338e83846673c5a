"""A Python function on several workers of this machine, from a notebook or a program that is no worker itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from lockstep.errors import ConfigError

Returned = TypeVar("Returned")


def run(
    function: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | Literal["auto"] = 1,
) -> list[Returned]:
    """Call `function(*args, **kwargs)` in `np` new worker processes, as `lockstep run -np` starts them.

    The function and what it refers to are copied to the workers, also if a notebook's cell defines it; so are its
    results back. What the workers print appears here. Interrupting the call ends them.

    Args:
        function: Called in every worker; `lockstep.train.fit` in it finds the other workers by itself.
        np: The number of workers; auto: one for each GPU.

    Returns:
        The results, by rank.

    Raises:
        ConfigError: `np` is no number of workers, or the function cannot be copied.
        WorkerFailedError: The function raised an error, whose traceback is in the message, or a worker died.
    """
    if np != "auto" and (not isinstance(np, int) or isinstance(np, bool) or np < 1):
        raise ConfigError(f"np={np!r}: give a number of workers, 1 or more, or auto")
    if not callable(function):
        raise ConfigError(f"{function!r:.80} is not a function; give the function itself, and its arguments as args=")
    from lockstep.launch.controller.run_function import run_function  # with cloudpickle

    return run_function(function, args, kwargs or {}, ["lockstep", "run", f"-np={np}"])
