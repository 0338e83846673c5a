"""The messages between driver and tasks: pickled objects over connections that are authenticated with a key."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.output.display import Name


@dataclass(frozen=True)
class TaskHello:
    """The first message of a task.

    Args:
        index: The index of its partition.
        host: Its host name.
        gpus: The addresses of the GPUs that Spark assigned to it.
    """

    index: int
    host: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class TaskAlive:
    """A task's heartbeat."""


@dataclass(frozen=True)
class WorkerLines:
    """Output lines of a task's worker."""

    name: Name
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class WorkerEnded:
    """A task's worker exited.

    Args:
        code: Its exit code, or minus the signal that killed it.
        files: Its result or error files, by name.
    """

    code: int
    files: dict[str, bytes]


@dataclass(frozen=True)
class StartWorker:
    """Start a worker.

    Args:
        variables: The worker's environment variables.
        call: The function and its arguments, pickled.
        executable: The worker's Python; None for the task's.
    """

    variables: dict[str, str]
    call: bytes
    executable: str | None


@dataclass(frozen=True)
class SignalWorker:
    """Send a signal to the worker and its descendants."""

    number: int


@dataclass(frozen=True)
class TaskOver:
    """End the task."""
