"""The launcher: start a job's workers on one or more hosts, and end them.

`command_workers` starts workers for Lockstep's commands, `run` for functions; `output` shows their output. The checks
of `lockstep doctor` are `machine_doctor`, `gpus_doctor` and `hosts_doctor`.

| package | purpose |
|---|---|
| `plan` | derives, without side effects, the commands that `--dry-run` prints from options and environment |
| `controller` | executes a plan, in the process of the user's command |
| `node` | runs on each host beside the workers: starts, watches and ends them |
| `forking` | forks workers from one process that has imported torch |
| `protocol`, `staging` | messages between the controller and the nodes; copies on the hosts' own disks |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from lockstep.errors import ConfigError

Returned = TypeVar("Returned")

__all__ = ["run"]


def run(
    function: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | Literal["auto"] = 1,
) -> list[Returned]:
    """Call `function(*args, **kwargs)` in `np` new worker processes, which are started as by `lockstep run -np`.

    The function and the objects that it uses are pickled, even if a notebook's cell defines them; so are the results.
    The workers' output appears here. Interrupting the call ends the workers.

    Args:
        function: Called in every worker; `lockstep.train.fit` in it connects to the other workers.
        np: The number of workers; "auto": one per GPU.

    Returns:
        The results, by rank.

    Raises:
        ConfigError: `np` is not a number of workers, or the function cannot be pickled.
        WorkerFailedError: The function raised an error (the message has the traceback), or a worker died.
    """
    if np != "auto" and (not isinstance(np, int) or isinstance(np, bool) or np < 1):
        raise ConfigError(f"np={np!r}: must be at least 1, or 'auto'")
    if not callable(function):
        raise ConfigError(f"{function!r:.80} is not a function; pass the function itself, and its arguments as args=")
    from lockstep.launch.controller.run_function import run_function  # with cloudpickle

    return run_function(function, args, kwargs or {}, np)
