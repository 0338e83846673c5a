"""What a host's node process has to know of a job, as the launcher tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import LockstepError
from lockstep.launch.wire import PROTOCOL


class NodeError(LockstepError):
    """This host cannot take its part in the job."""


@dataclass(frozen=True)
class NodeJob:
    """One start of the workers; the fields' JSON is the launcher's message.

    Args:
        node: This host's number among `nodes`.
        slots: Workers on each node; empty where the nodes are started by hand.
        host: This host's name in the plan.
        environment: On top of this process's own.
        folder: Where the workers start.
        secret: Known to the job alone; empty where nodes are started by hand and were given none.
        heartbeat: Whether silence means that the launcher is lost; a pipe on one machine tells without.
        stdout: A descriptor that workers write to directly, or -1.
        interfaces: The only ones to use, if any.
        by_hand: Address and port of the meeting point, where the nodes are started by hand.
        patience: Seconds to wait there for the other nodes.
        snapshots: The folder in memory that outlives the workers, "" where there is none.
        newcomer: This host was not there at the start before, and what it holds in memory is of no use.
        restart: How often the workers have been started anew before, of `max_restarts` times.
    """

    node: int
    nodes: int
    workers: int
    slots: list[int]
    host: str
    command: list[str]
    environment: dict[str, str]
    folder: str
    bind: str
    secret: str = field(repr=False)
    heartbeat: bool
    stdout: int
    interfaces: list[str]
    by_hand: list[Any] | None
    patience: float
    loopback: bool
    snapshots: str
    newcomer: bool
    restart: int
    max_restarts: int
    protocol: int = PROTOCOL
