"""Generations: how a worker keeps its process when others of its job are lost or added.

A generation is a set of workers with ranks and a store. A worker that can continue in another one tells the node
process on its host (`stay`). When it has lost a peer, or heard that the hosts have changed, it leaves its process
groups and calls `join_next`. Other workers are ended and started again. Over a connection on this host, each line is a
JSON object; `lockstep.launch.node.staying_workers` is the other side.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.diagnosis import publisher
from lockstep.errors import WorldError
from lockstep.files.untrusted import parse_json
from lockstep.world import rendezvous
from lockstep.world.launcher_environment import NODE_PROCESS

REMOVED, ADDED = 1, 2  # changes of the hosts; 3 is both
CONNECT_SECONDS = 10.0
LINE_BYTES = 1 << 16


class _Line:
    """This worker's connection to the node process, and what it has heard from it."""

    def __init__(self, address: str) -> None:
        host, port, self._secret, self._number = address.split(":")
        self.owner = os.getpid()
        self.changes: list[int] = []
        self.included = 0  # how many of the changes the current generation includes
        self.is_over = False  # the current generation
        self._answers: list[Mapping[str, str]] = []
        self._connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        self._heard = b""

    def introduce(self, must_lead: bool) -> None:
        self.send({"secret": self._secret, "worker": int(self._number), "must_lead": must_lead})

    def send(self, message: Mapping[str, Any]) -> None:
        self._connection.settimeout(CONNECT_SECONDS)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def listen(self, seconds: float | None) -> None:
        """Take in what has arrived, after waiting for it up to `seconds`.

        Raises:
            WorldError: The node process has closed the connection.
        """
        self._connection.settimeout(seconds)
        try:
            part = self._connection.recv(LINE_BYTES)
        except (TimeoutError, BlockingIOError):
            return
        except OSError:
            part = b""
        if not part:
            raise WorldError("the node process on this host, which starts the workers, has exited")
        *lines, self._heard = (self._heard + part).split(b"\n")
        for line in lines:
            message = parse_json(line)
            if "change" in message:
                self.changes.append(int(message["change"]))
            self.is_over |= "over" in message
            if "variables" in message:
                self._answers.append(message["variables"])

    def wait_for_variables(self) -> Mapping[str, str]:
        """Wait for the next generation, and return this worker's variables in it; empty if it is not needed."""
        self.send({"waits": True})
        while not self._answers:
            self.listen(None)
        return self._answers.pop()


_line: _Line | None = None


def _own_line() -> _Line | None:
    """Return the connection, unless this process is a forked child of the worker."""
    return _line if _line and _line.owner == os.getpid() else None


def stay(must_lead: bool = False) -> bool:
    """Tell the node process that this worker can continue in another generation; return whether there may be one.

    From now on, a lost peer does not end this worker, which must call `join_next` within Timings.leave.

    Args:
        must_lead: Rank 0 of the next generation has to be a worker that stays, because the others copy its state.
    """
    global _line
    address = os.environ.get(NODE_PROCESS, "")
    if not address or _own_line():
        return bool(address)
    with suppress(OSError):
        line = _Line(address)
        line.introduce(must_lead)
        _line = line
    return _own_line() is not None


def join_next() -> None:
    """Wait for the next generation; set this process's variables, from which its new rank info can be read.

    The process must have left its groups.

    Raises:
        SystemExit: With code 0, if the job no longer needs this worker.
        WorldError: The node process has exited.
    """
    line = _own_line()
    if line is None:
        raise WorldError("this worker cannot continue with other workers: no launcher of Lockstep watches it")
    variables = line.wait_for_variables()
    if not variables:
        raise SystemExit(0)
    line.included, line.is_over = len(line.changes), False
    os.environ.update(variables)
    rendezvous.forget_stores()
    publisher.move()


def is_over(seconds: float = 2.0) -> bool:
    """Return whether the current generation has ended; wait up to `seconds` for the news."""
    line = _own_line()
    deadline = time.monotonic() + seconds
    while line and not line.is_over and (left := deadline - time.monotonic()) > 0:
        line.listen(left)
    return line is not None and line.is_over


def host_changes(since: int) -> tuple[int, int]:
    """Return the number of changes of the hosts so far, and which of ADDED | REMOVED those after the first `since` are.

    Changes that the current generation includes are left out, even if they are after `since`.
    """
    line = _own_line()
    if line is None:
        return 0, 0
    line.listen(0.0)
    news = 0
    for kind in line.changes[max(since, line.included) :]:
        news |= kind
    return len(line.changes), news
