"""What the driver and its tasks tell each other: pickled objects over connections that a common key has opened."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.output.display import Name


@dataclass(frozen=True)
class TaskHello:
    """A task's first words.

    Args:
        index: Of its partition.
        gpus: The addresses of those that Spark has given it.
    """

    index: int
    host: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class TaskAlive:
    """Nothing new: a sign of life of a task."""


@dataclass(frozen=True)
class WorkerLines:
    """What a task's worker has written."""

    name: Name
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class WorkerEnded:
    """A task's worker has.

    Args:
        code: Its exit code, or minus the signal that ended it.
        files: By name, the result or the error that it has left.
    """

    code: int
    files: dict[str, bytes]


@dataclass(frozen=True)
class StartWorker:
    """Start a worker.

    Args:
        call: The function and its arguments, pickled.
        executable: The worker's Python; the task's own if None.
    """

    variables: dict[str, str]
    call: bytes
    executable: str | None


@dataclass(frozen=True)
class SignalWorker:
    """Send a signal to the worker and what it has started."""

    number: int


@dataclass(frozen=True)
class TaskOver:
    """The task may end."""
