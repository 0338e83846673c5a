"""`python -m lockstep.launch.node.stager`: one host's part in copying shared files to the disks of a job's hosts.

The launcher (`lockstep.launch.controller.staging`) asks questions over standard streams, one JSON object a line, and
closes the streams at the end. The first host reads the shared files. Each host passes the blocks that it receives on to
the next one while it writes them, so all have their copies about when the first one has read the last file, and the
file server serves each byte once.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import shutil
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, NoReturn, TypeVar

from lockstep import __version__
from lockstep.errors import LockstepError, first_line
from lockstep.files.untrusted import parse_json
from lockstep.launch.node.copies import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    MANIFEST,
    Block,
    Copies,
    CopyError,
    Draft,
    Manifest,
    block_of,
    read_blocks,
    scan,
)
from lockstep.launch.plan.staging import ENVIRONMENT, environment_folders
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, listen, proof
from lockstep.world.interfaces import addresses

STALL_SECONDS = 300.0  # without a byte from the previous host, or a byte that the next one accepts
CONNECT_SECONDS = 10.0
REPORT_SECONDS = 1.0
WAITING = 16  # blocks that are received, or to be sent
HEAD = struct.Struct(f"!Q{DIGEST_BYTES}s")  # before each block, and before the manifest
PROOF_BYTES = 32
T = TypeVar("T")


class PeerError(LockstepError):
    """Another host has disconnected or stalled; it knows why."""


class Stager:
    """This host's copies, and the files that it has described."""

    def __init__(self, secret: str, folder: str, interfaces: list[str], token: str, hosts: int) -> None:
        self._secret = secret
        self._copies = Copies(folder)
        self._manifests: dict[str, Manifest] = {}  # of the sources, by key
        self._drafts: dict[str, Draft] = {}
        own = addresses(interfaces) if hosts > 1 else []
        self._listeners = [listener for _, address in own if (listener := _listen(address))]
        self._mark = f".host-{token}-"
        self._own_mark = self._copies.folder / f"{self._mark}{secrets.token_hex(8)}"
        self._own_mark.touch()
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        self._own_mark.unlink(missing_ok=True)
        self._copies.close()

    def scan(self, sources: list[str], python_path: str) -> dict[str, Any]:
        """Describe the sources: each one's path, key, bytes and number of files."""
        paths: dict[str, tuple[str, ...]] = {source: () for source in sources if source != ENVIRONMENT}
        if ENVIRONMENT in sources:
            folders = environment_folders([*python_path.split(":"), *sys.path])
            if not folders:
                raise CopyError("all packages of this Python are in /usr, on the host's own disk; remove `environment`")
            paths |= folders
        found = {path: scan(path, left_out) for path, left_out in paths.items()}
        self._manifests |= {manifest.key: manifest for manifest in found.values()}
        return {"found": [(path, each.key, each.size, len(each.files)) for path, each in found.items()]}

    def check(self, sources: list[tuple[str, str, int]]) -> dict[str, Any]:
        """Return, for each source with its key and bytes, the blocks that are here; None for a complete copy."""
        blocks = [self._blocks(source, key) for source, key, _ in sources]
        rest = sum(
            size - done * BLOCK_BYTES for (*_, size), done in zip(sources, blocks, strict=True) if done is not None
        )
        free = shutil.disk_usage(self._copies.folder).free
        if rest > free:
            raise CopyError(
                f"{self._copies.folder} has {free / 1e9:.1f} GB free, and the copies need {rest / 1e9:.1f} GB; free "
                "some, or choose another folder by --stage-dir"
            )
        ports = {each.getsockname()[0]: each.getsockname()[1] for each in self._listeners}
        return {"blocks": blocks, "listeners": ports}

    def _blocks(self, source: str, key: str) -> int | None:
        if self._copies.find(source, key):
            return None
        if not (draft := self._copies.interrupted(key)):
            return 0
        if draft.blocks == draft.manifest.blocks:
            draft.finish()
            return None
        self._drafts[key] = draft
        return draft.blocks

    def count_hosts(self) -> dict[str, Any]:
        """Count the hosts of this job that share this folder."""
        return {"hosts": sum(path.name.startswith(self._mark) for path in self._copies.folder.iterdir())}

    def copy(
        self,
        source: str,
        key: str,
        first: int,
        upstream: dict[str, int],
        neighbors: tuple[str, str],
        report: Callable[[int], None],
    ) -> dict[str, Any]:
        """Take part in copying a source, from block `first` on.

        Args:
            upstream: The previous host's addresses and ports; empty at the host that reads the source, or its own copy.
            neighbors: The names of the previous host and of the next one; empty without one.
            report: Called with the number of blocks that are done.
        """
        previous, following = neighbors
        if upstream:
            connection = self._connect(upstream, previous)
            manifest, blocks = _receive(connection, previous, key, first)
        else:
            manifest, blocks = self._read(source, key, first)
        draft = self._drafts.pop(key, None)
        if draft is None and not self._copies.holds(key):
            draft = self._copies.begin(manifest)
        send = _sender(self._accept_next(following), following, manifest) if following else None
        reported = time.monotonic()
        try:
            for number, block in enumerate(_ahead(blocks), first):
                if send:
                    send(block)
                if draft and number >= draft.blocks:
                    draft.write(block)
                if time.monotonic() - reported > REPORT_SECONDS:
                    report(number + 1)
                    reported = time.monotonic()
            if draft:
                draft.finish()
        except OSError as error:
            raise CopyError(
                f"{self._copies.folder} cannot be written: {error.strerror or error}; see --stage-dir"
            ) from None
        if send:
            send(None)
        return {"path": self._copies.path(source, key)}

    def _read(self, source: str, key: str, first: int) -> tuple[Manifest, Iterator[Block]]:
        if self._copies.holds(key):
            root, is_copy = self._copies.path(source, key), True
            manifest = Manifest.unpack((self._copies.folder / key / MANIFEST).read_bytes())
        else:
            root, is_copy = os.path.realpath(source), False
            manifest = self._manifests[key]
        return manifest, read_blocks(root, manifest, first, is_copy)

    def _connect(self, upstream: Mapping[str, int], host: str) -> socket.socket:
        """Connect to the previous host, which may have addresses that are another machine's here."""
        for address, port in upstream.items():
            with suppress(OSError):
                connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
                challenge = secrets.token_bytes(CHALLENGE_BYTES)
                connection.sendall(challenge)
                theirs, answer = _exactly(connection, CHALLENGE_BYTES), _exactly(connection, PROOF_BYTES)
                if hmac.compare_digest(answer, proof(self._secret, "sends a copy", challenge + theirs)):
                    connection.sendall(proof(self._secret, "receives a copy", challenge + theirs))
                    connection.settimeout(STALL_SECONDS)
                    return connection
                connection.close()
        raise CopyError(
            f"cannot reach {host} at any of its addresses ({', '.join(upstream)}); is there a firewall between them? "
            "--interface names the network to use"
        )

    def _accept(self, listener: socket.socket) -> None:
        """Accept the next host's connections; disconnect peers that do not know the job's secret."""
        while True:
            connection, _ = listener.accept()
            with suppress(OSError):
                connection.settimeout(CONNECT_SECONDS)
                challenges = _exactly(connection, CHALLENGE_BYTES) + (own := secrets.token_bytes(CHALLENGE_BYTES))
                connection.sendall(own + proof(self._secret, "sends a copy", challenges))
                answer = _exactly(connection, PROOF_BYTES)
                if hmac.compare_digest(answer, proof(self._secret, "receives a copy", challenges)):
                    connection.settimeout(STALL_SECONDS)
                    self._accepted.put(connection)
                    continue
            connection.close()

    def _accept_next(self, host: str) -> socket.socket:
        try:
            return self._accepted.get(timeout=STALL_SECONDS)
        except queue.Empty:
            raise PeerError(f"{host} has not connected within {STALL_SECONDS:g} s") from None


def _listen(address: str) -> socket.socket | None:
    try:
        return listen(address)
    except OSError:  # an address that cannot be bound is not reachable either
        return None


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes.

    Raises:
        OSError: The peer disconnects, or sends nothing for too long.
    """
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionResetError("disconnected")
        view = view[received:]
    return bytes(data)


def _receive(connection: socket.socket, host: str, key: str, first: int) -> tuple[Manifest, Iterator[Block]]:
    """Return the manifest that the previous host sends, and the blocks that follow it."""
    manifest = Manifest.unpack(_receive_block(connection, host).data)
    if manifest.key != key:
        raise CopyError(f"{host} sends another copy; start the job again")
    return manifest, (_receive_block(connection, host) for _ in range(first, manifest.blocks))


def _receive_block(connection: socket.socket, host: str) -> Block:
    try:
        length, expected = HEAD.unpack(_exactly(connection, HEAD.size))
        block = block_of(_exactly(connection, length))
    except TimeoutError:
        raise PeerError(f"{host} has sent nothing for {STALL_SECONDS:g} s") from None
    except OSError as error:
        raise PeerError(f"lost the connection to {host}: {error}") from None
    if block.digest != expected:
        raise CopyError(f"a block was damaged on its way from {host}; start the job again")
    return block


def _sender(connection: socket.socket, host: str, manifest: Manifest) -> Callable[[Block | None], None]:
    """Return a function that sends a block in the background or, with None, waits until all are sent."""
    pool, sending = ThreadPoolExecutor(1), deque[Future[None]]()

    def send(block: Block | None) -> None:
        if block:
            sending.append(pool.submit(connection.sendall, HEAD.pack(len(block.data), block.digest) + block.data))
        try:
            while sending and (block is None or len(sending) > WAITING):
                sending.popleft().result()
        except OSError as error:
            raise PeerError(f"lost the connection to {host}: {error}") from None

    send(block_of(manifest.pack()))
    return send


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items that another thread takes from an iterator before they are needed."""
    pool = ThreadPoolExecutor(1)
    waiting = deque(pool.submit(next, items, None) for _ in range(WAITING))
    while (item := waiting.popleft().result()) is not None:
        waiting.append(pool.submit(next, items, None))
        yield item
    pool.shutdown(wait=False)


def main() -> NoReturn:
    """Answer the launcher's questions until it closes the stream."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not look like an answer
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stagers: list[Stager] = []
    threading.Thread(target=_answer_all, args=(lines, answers, stagers), daemon=True).start()
    for line in questions:
        lines.put(line)
    for stager in stagers:
        stager.close()
    os._exit(0)  # a thread may wait for another host


def _answer_all(lines: queue.SimpleQueue[bytes], answers: IO[bytes], stagers: list[Stager]) -> None:
    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")

    while True:
        try:
            say(_answer(parse_json(lines.get()), stagers, lambda blocks: say({"done_blocks": blocks})))
        except LockstepError as error:
            say({"error": str(error), "is_consequence": isinstance(error, PeerError)})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {first_line(error)}", "is_consequence": False})


def _answer(question: dict[str, Any], stagers: list[Stager], report: Callable[[int], None]) -> dict[str, Any]:
    match question.pop("ask"):
        case "begin":
            if question.pop("version") != __version__:
                raise CopyError(f"Lockstep {__version__} is installed there, unlike the launcher's version")
            stagers.append(Stager(**question))
            return {"ready": True}
        case "scan":
            return stagers[0].scan(**question)
        case "check":
            return stagers[0].check(**question)
        case "count":
            return stagers[0].count_hosts()
        case _:
            return stagers[0].copy(**question, report=report)


if __name__ == "__main__":
    main()
