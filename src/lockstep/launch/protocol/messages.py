"""What the launcher and its node processes tell each other, over standard streams, and nodes that are started manually
among themselves, over TCP: one JSON object a line, which `is` a message of one of these kinds.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field

from lockstep.config.mapping import from_mapping
from lockstep.errors import ConfigError, first_line
from lockstep.files.untrusted import parse_json
from lockstep.launch.plan.timings import Timings

# The agreement of both sides on these messages; hosts with another one have another Lockstep.
PROTOCOL = 5
NOBODY_SPOKE = 79  # the exit code of a node process that is told nothing: it could have been used
LIMIT_BYTES = 1 << 22  # a chunk of output is 64 KiB, of which JSON can make six times as much


@dataclass(frozen=True)
class Message:
    """Something that one side tells the other."""


@dataclass(frozen=True)
class Alive(Message):
    """Nothing new: a sign of life, from either side."""


# From the launcher to a node process


@dataclass(frozen=True)
class NodeJob(Message):
    """What a host's node process has to know of one start of the workers.

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
        meeting_host: Where the nodes meet that are started by hand, at `meeting_port`; "" for others.
        patience: Seconds to wait there for the other nodes.
        snapshots: The folder in memory that outlives the workers, "" where there is none.
        newcomer: This host was not there at the start before, and what it holds in memory is of no use.
        restart: How often the workers have been started anew before, of `max_restarts` times.
        elastic: `Start` starts no workers: each is asked for by `StartSlotWorker`.
    """

    node: int
    nodes: int
    workers: int
    slots: tuple[int, ...]
    host: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    bind: str
    secret: str = field(repr=False)
    heartbeat: bool
    stdout: int
    interfaces: tuple[str, ...]
    meeting_host: str
    meeting_port: int
    patience: float
    loopback: bool
    snapshots: str
    newcomer: bool
    restart: int
    max_restarts: int
    elastic: bool
    timings: Timings
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Reach(Message):
    """Try the first host's `doors`: its addresses, each with its port."""

    doors: dict[str, int]


@dataclass(frozen=True)
class Start(Message):
    """Start the workers.

    Args:
        address: Where the job's store is, as `port`.
        own: This host's address on the way there.
    """

    address: str
    port: int
    own: str


@dataclass(frozen=True)
class Signal(Message):
    """Send a signal to the workers."""

    number: int


@dataclass(frozen=True)
class StartSlotWorker(Message):
    """Start a worker of an elastic job.

    Args:
        number: Its number in `Output`, `SignalSlotWorker` and `SlotWorkerEnded`; each is used once.
        variables: Set for this worker, on top of the job's.
    """

    number: int
    variables: dict[str, str]


@dataclass(frozen=True)
class SignalSlotWorker(Message):
    """Send a signal to one worker of an elastic job and to its session."""

    worker: int
    number: int


@dataclass(frozen=True)
class End(Message):
    """End the workers; by force after so many seconds."""

    seconds: float


# From a node process to the launcher


@dataclass(frozen=True)
class Trouble(Message):
    """This host cannot take its part, or no longer."""

    text: str


@dataclass(frozen=True)
class Here(Message):
    """This host takes part; `doors` are the first one's of several, `cores` those that its workers may use."""

    versions: dict[str, str]
    doors: dict[str, int] = field(default_factory=dict)
    cores: int = 0


@dataclass(frozen=True)
class Reached(Message):
    """The doors that are open to this host, each with this host's own address on the way."""

    ways: dict[str, str]


@dataclass(frozen=True)
class Met(Message):
    """This host knows all that it needs of the others."""


@dataclass(frozen=True)
class Started(Message):
    """This host's workers run.

    Args:
        size: Workers of the whole job.
        note: Why they were not forked, "" where they were.
    """

    first_rank: int
    size: int
    note: str


@dataclass(frozen=True)
class Output(Message):
    """What a worker has written.

    Args:
        worker: Its local rank; in an elastic job its number.
        name: stdout or stderr.
        text: `text_of` the bytes; empty at the stream's end.
    """

    worker: int
    name: str
    text: str


@dataclass(frozen=True)
class SlotWorkerEnded(Message):
    """A worker of an elastic job has exited, and what it had started has been killed.

    Args:
        code: Its exit code, or minus the signal that ended it.
    """

    worker: int
    code: int


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that has failed.

    Args:
        code: Its exit code, or minus the signal that ended it.
        age: Seconds since then, as clocks of hosts differ.
        text: Its own words, where it is one of Lockstep's.
        lost_peer: It failed only because another had.
        final: It would come again if the job were started anew.
    """

    rank: int
    code: int
    age: float
    text: str = ""
    lost_peer: bool = False
    final: bool = False


@dataclass(frozen=True)
class Failing(Message):
    """A worker here has failed; the others are being ended."""


@dataclass(frozen=True)
class FailedElsewhere(Message):
    """Why all nodes end: another host's failures, none where it is lost."""

    host: str
    failures: tuple[WorkerFailure, ...]


@dataclass(frozen=True)
class Ended(Message):
    """This host's part is over.

    Args:
        left: Processes that cannot be ended.
        error: What has failed beside the workers.
        elsewhere: What has ended the job, where it was another node that was started by hand.
    """

    failures: tuple[WorkerFailure, ...] = ()
    left: tuple[int, ...] = ()
    error: str = ""
    elsewhere: FailedElsewhere | None = None


# Between nodes that are started manually


@dataclass(frozen=True)
class Knock(Message):
    """A node's first words: its number, and the challenge that proves the first node."""

    node: int
    challenge: str
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Answer(Message):
    """The first node's proof, and the challenge that proves the other one."""

    proof: str
    challenge: str


@dataclass(frozen=True)
class Introduction(Message):
    """A node's proof and what it brings."""

    proof: str
    nodes: int
    workers: int
    host: str


@dataclass(frozen=True)
class Refused(Message):
    """A node cannot join."""

    why: str


@dataclass(frozen=True)
class Terms(Message):
    """What holds for all nodes.

    Args:
        slots: Workers on each node, by node.
        run_id: The job's name, chosen by the first node.
    """

    slots: tuple[int, ...]
    run_id: str


@dataclass(frozen=True)
class Finished(Message):
    """This node's workers have finished; from the first node, those of all."""


@dataclass(frozen=True)
class Foreign(Message):
    """The first message of another version of Lockstep, whatever it says."""


def _name(kind: type[Message]) -> str:
    """What a kind is called on the line; `error` for every version, so that it can say that it is another one."""
    return "error" if kind is Trouble else kind.__name__.lower()


KINDS = {_name(kind): kind for kind in Message.__subclasses__() if kind is not Foreign}


class MessageError(Exception):
    """A message of a known kind is not as it should be."""


def pack(message: Message) -> bytes:
    """The line that says it."""
    return json.dumps({"is": _name(type(message)), **asdict(message)}).encode() + b"\n"


def unpack(line: bytes) -> Message | None:
    """The message in a line; None for anything else, such as a login's greeting.

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


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None at the end of the stream. Lines that are none are passed over.

    Raises:
        MessageError: As for `unpack`.
    """
    while line := await reader.readline():
        if message := unpack(line):
            return message
    return None
