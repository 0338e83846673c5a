"""Messages between the launcher and its node processes, over standard streams or, if their nodes are started manually,
over TCP. Each is a line with a JSON object, whose `is` is the kind of message.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Protocol

from lockstep.config.mapping import from_mapping
from lockstep.diagnosis.inspection import WorkerState
from lockstep.diagnosis.observed_steps import ProcessSteps
from lockstep.errors import ConfigError, first_line
from lockstep.files.untrusted import parse_json
from lockstep.launch.plan.timings import Timings

PROTOCOL = 19  # the version of these messages
NO_MESSAGE = 79  # exit code of a node process that received no message
LIMIT_BYTES = 1 << 26  # the states of 128 workers, each with 100 frames and 1,000 names of operations


@dataclass(frozen=True)
class Message:
    """A message in either direction."""


@dataclass(frozen=True)
class Alive(Message):
    """A heartbeat, from either side."""


# From the launcher to a node process


@dataclass(frozen=True)
class NodeJob(Message):
    """A host's part of one generation of the job; what is not described here is as in `JobPlan`.

    Args:
        node: This host's number.
        slots: Workers on each node.
        host: This host's name in the plan.
        command: The workers' command; empty for a manually started node that has its own.
        added: Arguments to add to such a node's own command.
        environment: Variables to add to the node process's environment.
        folder: The workers' working directory.
        secret: Known only to the job.
        heartbeat: Whether silence means that the launcher died; on one machine, a pipe shows that.
        stdout: A descriptor to which workers write directly, or -1.
        address: The only address of the first host at which to serve the store; "" for any that all hosts reach.
        newcomer: This host was not part of the previous generation; snapshots in its memory are obsolete.
    """

    node: int
    slots: tuple[int, ...]
    host: str
    command: tuple[str, ...]
    added: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    bind: str
    secret: str = field(repr=False)
    heartbeat: bool
    stdout: int
    terminal: bool
    interfaces: tuple[str, ...]
    address: str
    loopback: bool
    snapshots: str
    newcomer: bool
    generation: int
    loss: str
    max_restarts: int
    hang_timeout: float
    timings: Timings
    protocol: int = PROTOCOL

    @property
    def workers(self) -> int:
        return self.slots[self.node]

    @property
    def is_elastic(self) -> bool:
        """Whether this may not be the job's last generation."""
        return bool(self.snapshots)


@dataclass(frozen=True)
class Reach(Message):
    """Try to reach the first host's `listeners`: its listening addresses with their ports."""

    listeners: dict[str, int]


@dataclass(frozen=True)
class Start(Message):
    """Start the workers.

    Args:
        address: The address of the job's store, at `port`.
        own: This host's address on the route there.
    """

    address: str
    port: int
    own: str


@dataclass(frozen=True)
class Signal(Message):
    """Send a signal to the workers."""

    number: int


@dataclass(frozen=True)
class HostsChanged(Message):
    """Let the workers leave this generation between two steps.

    Args:
        change: What has happened to the hosts, as in `lockstep.world.generations`.
    """

    change: int


@dataclass(frozen=True)
class Leave(Message):
    """This generation is over: end the workers that cannot continue in another one."""


@dataclass(frozen=True)
class Inspect(Message):
    """Send the state of all workers, as `Inspected`."""


@dataclass(frozen=True)
class End(Message):
    """End the workers; kill them after this many seconds."""

    seconds: float


# From a node process to the launcher


@dataclass(frozen=True)
class NodeFailure(Message):
    """This host cannot run its part of the job, or cannot any more."""

    text: str


@dataclass(frozen=True)
class NodeReady(Message):
    """This host is ready.

    Args:
        listeners: Its listening addresses with their ports, if it is the first of several hosts.
        cores: Its usable cores.
    """

    versions: dict[str, str]
    listeners: dict[str, int] = field(default_factory=dict)
    cores: int = 0


@dataclass(frozen=True)
class Reached(Message):
    """The first host's addresses that this host can reach, each with this host's address on the route."""

    ways: dict[str, str]


@dataclass(frozen=True)
class Started(Message):
    """This host's workers are running.

    Args:
        note: Why they were not forked; "" if they were.
    """

    note: str


@dataclass(frozen=True)
class Output(Message):
    """A worker's output.

    Args:
        name: stdout or stderr.
        text: `text_of` the bytes; empty at the end of the stream.
    """

    rank: int
    name: str
    text: str


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed.

    Args:
        code: Its exit code, or minus the signal that ended it.
        age: Seconds since then, because the hosts' clocks differ.
        text: Its error message, if it reported one to Lockstep.
        lost_peer: It failed only because another worker had.
        final: It would fail again in another generation.
    """

    rank: int
    code: int
    age: float
    text: str = ""
    lost_peer: bool = False
    final: bool = False


@dataclass(frozen=True)
class Failing(Message):
    """A worker of this host failed, or has left its generation; those that cannot continue are being ended."""


@dataclass(frozen=True)
class NoProgress(Message):
    """No worker of this host has made progress for this time; 0 once one makes progress again.

    Args:
        workers: What their boards show, in case the inspection fails.
    """

    seconds: float
    workers: tuple[WorkerState, ...] = ()


@dataclass(frozen=True)
class PeersLeft(Message):
    """Which workers of this host have left, and whether others cannot continue without one, of any host.

    Args:
        finished: The ranks that have exited with code 0, in this order.
        lost_peer: A worker that can stay has lost the connection to a peer.
        joining: All that run have waited for some seconds for others to create a process group.
    """

    finished: tuple[int, ...] = ()
    lost_peer: bool = False
    joining: bool = False


@dataclass(frozen=True)
class StepsObserved(Message):
    """The steps of this host's workers so far.

    Args:
        oversubscribed: Whether this host has more busy threads than cores.
        joules: The energy that this host has used since the last message, by kind.
        unread: Which energy is not counted, and why, if that is new.
        gpu_use: In which share of the last moment each GPU that shows it was busy.
    """

    processes: tuple[ProcessSteps, ...]
    oversubscribed: bool
    joules: dict[str, float]
    unread: tuple[str, ...]
    gpu_use: tuple[float, ...] = ()


@dataclass(frozen=True)
class Inspected(Message):
    """The state of this host's workers, by rank; none if the inspection failed with an error."""

    workers: tuple[WorkerState, ...]
    error: str = ""


@dataclass(frozen=True)
class Ended(Message):
    """This host's part of the job is over.

    Args:
        left: Processes that cannot be ended.
        error: An error other than a failed worker.
        apart: The workers have imported torch, and none has joined a process group.
        staying: How many workers wait for the next generation.
        must_lead: Rank 0 of that generation has to be one that stays; only such workers had the job's state.
        has_commit: One that could not stay has left the state in this host's memory, for rank 0.
    """

    failures: tuple[WorkerFailure, ...] = ()
    left: tuple[int, ...] = ()
    error: str = ""
    apart: bool = False
    staying: int = 0
    must_lead: bool = False
    has_commit: bool = False


# Between the first of several manually started nodes and another one


@dataclass(frozen=True)
class Knock(Message):
    """A node's first message: its number, and its challenge to the first node."""

    node: int
    challenge: str
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Answer(Message):
    """The first node's proof, and its challenge to the other node."""

    proof: str
    challenge: str


@dataclass(frozen=True)
class Introduction(Message):
    """What a node that connects says about itself; the line's HMAC is its proof.

    Args:
        node: Its number among `nodes`.
        host: Its host's name.
        obeys: It runs the first node's command, because its own is a study or has `--stage`.
        ticket: That of the `Launch` which this connection answers; "" for the node's first connection.
    """

    node: int
    nodes: int
    workers: int
    host: str
    obeys: bool = False
    ticket: str = ""


@dataclass(frozen=True)
class Refused(Message):
    """A node cannot join."""

    why: str


@dataclass(frozen=True)
class Launch(Message):
    """Start a process, and connect its streams to the first node by another connection.

    Args:
        stager: The process that copies files for `--stage`, instead of a node process.
    """

    ticket: str
    stager: bool


@dataclass(frozen=True)
class Announcement(Message):
    """What the launcher says about the job, for the terminal of another node."""

    text: str


@dataclass(frozen=True)
class JobOver(Message):
    """The job finished with this exit code."""

    code: int


@dataclass(frozen=True)
class NodeExited(Message):
    """The last line of a relayed node process: its exit code, and the end of its standard error."""

    code: int
    stderr: str


@dataclass(frozen=True)
class Foreign(Message):
    """The first message of another version of Lockstep, whatever it contains."""


def _name(kind: type[Message]) -> str:
    """Return a kind's name in messages. `error` is the same in all versions, so that another version can read it."""
    return "error" if kind is NodeFailure else kind.__name__.lower()


KINDS = {_name(kind): kind for kind in Message.__subclasses__() if kind is not Foreign}


class MessageError(Exception):
    """A message of a known kind is invalid."""


def pack(message: Message) -> bytes:
    """Return the message as a line."""
    return json.dumps({"is": _name(type(message)), **asdict(message)}).encode() + b"\n"


def unpack(line: bytes) -> Message | None:
    """Return the message in a line; None for other text, such as a login banner.

    Raises:
        MessageError: A field is missing, unknown, or of another type.
    """
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    if values.get("protocol", PROTOCOL) != PROTOCOL:
        return Foreign()
    kind = values.pop("is", None)
    if not isinstance(kind, str) or kind not in KINDS:
        return None
    try:
        return from_mapping(KINDS[kind], values, kind)
    except (ConfigError, TypeError, ValueError) as error:
        raise MessageError(f"{kind}: {first_line(error)}") from None


class LineReader(Protocol):
    """A stream of lines."""

    async def readline(self) -> bytes:
        """Return the next line; empty at the end of the stream."""
        ...


class HostProcess(LineReader, Protocol):
    """A process of Lockstep on a host, connected by lines."""

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""

    @property
    def last_lines(self) -> str:
        """The end of its standard error: that of ssh or similar, or of Python on the host."""

    def send(self, line: bytes) -> None:
        """Send it a line, unless it has disconnected."""

    async def wait(self) -> int:
        """Wait until it exits; return its exit code."""

    async def close(self, seconds: float) -> None:
        """Close the connection, and kill the process if it does not exit in time."""


async def receive(reader: LineReader) -> Message | None:
    """Return the next message; None at the end of the stream. Other lines are skipped.

    Raises:
        MessageError: As for `unpack`.
    """
    while line := await reader.readline():
        if message := unpack(line):
            return message
    return None


async def reader_of(descriptor: int) -> asyncio.StreamReader:
    """Return a reader of a pipe."""
    reader = asyncio.StreamReader(limit=LIMIT_BYTES)
    pipe = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def writer_to(descriptor: int) -> asyncio.StreamWriter:
    """Return a writer to a pipe. `drain` waits until everything is written."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0)
    )
    transport.set_write_buffer_limits(high=0)
    return asyncio.StreamWriter(transport, protocol, None, loop)


def text_of(data: bytes) -> str:
    """Return any bytes as text for JSON."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
