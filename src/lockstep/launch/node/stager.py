"""`python -m lockstep.launch.node.stager`: one host's part in copying shared files to the disks of a job's hosts.

The launcher (`lockstep.launch.controller.job_copies`) asks questions over standard streams, one JSON object a line, and
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
from pathlib import Path
from typing import IO, Any, NoReturn

from lockstep import __version__
from lockstep.errors import LockstepError, first_line
from lockstep.files.untrusted import parse_json
from lockstep.launch.node import copies
from lockstep.launch.node.copies import DIGEST_BYTES, Block, CopyError, CopyManifest, Draft
from lockstep.launch.plan.stage_options import BLOCK_BYTES, CACHES, ENVIRONMENT, environment_folders
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, listen, proof
from lockstep.world.interfaces import addresses

STALL_SECONDS = 300.0  # without a byte from the previous host, or a byte that the next one accepts
CONNECT_SECONDS = 10.0
REPORT_SECONDS = 1.0
OLD_SECONDS = 86400.0
WAITING = 16  # blocks to be sent
HEAD = struct.Struct(f"!Q{DIGEST_BYTES}s")  # before each block, and before the manifest
PROOF_BYTES = 32


class PeerError(LockstepError):
    """Another host has disconnected or stalled; it knows why."""


class Stager:
    """This host's copies, and the files that it has described.

    Args:
        token: Names this job's files in the folder, by which hosts notice that they share it.
        hosts: The number of hosts that take part.
    """

    def __init__(self, secret: str, folder: str, interfaces: list[str], token: str, hosts: int) -> None:
        self._secret = secret
        self._copies = copies.Copies(folder)
        for cache in CACHES.values():
            (self._copies.folder / "caches" / cache).mkdir(parents=True, exist_ok=True)
        self._manifests: dict[str, CopyManifest] = {}  # of the sources, by name
        self._drafts: dict[str, Draft] = {}
        self._listeners: list[socket.socket] = []
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for _, address in addresses(interfaces) if hosts > 1 else []:
            with suppress(OSError):  # an address that cannot be bound is not reachable either
                self._listeners.append(listen(address))
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        for old in self._copies.folder.glob(".host-*"):
            if time.time() - old.stat().st_mtime > OLD_SECONDS:
                old.unlink(missing_ok=True)
        self._marks = f".host-{token}-"
        self._mark = self._copies.folder / f"{self._marks}{secrets.token_hex(8)}"
        self._mark.touch()

    def close(self) -> None:
        self._mark.unlink(missing_ok=True)

    def scan(self, sources: list[str], python_path: str, paths: list[str]) -> dict[str, Any]:
        """Describe the sources: each one's path, copy's name and path, files and bytes; and tell which paths exist."""
        given: dict[str, tuple[str, ...]] = {source: () for source in sources if source != ENVIRONMENT}
        environment = environment_folders([*python_path.split(":"), *sys.path]) if ENVIRONMENT in sources else {}
        if ENVIRONMENT in sources and not environment:
            raise CopyError("all packages of this Python are in /usr, on the host's own disk; remove `environment`")
        found = []
        for path, left_out in {**given, **environment}.items():
            own = os.path.relpath(os.path.realpath(self._copies.folder), os.path.realpath(path))
            manifest = copies.scan(path, (*left_out, *([] if own.startswith("..") else [own])), path in environment)
            self._manifests[manifest.name] = manifest
            copy = copies.files_of(self._copies.folder / manifest.name, manifest)
            found.append((path, manifest.name, copy, len(manifest.files), manifest.size, manifest.disk_bytes))
        return {"found": found, "existing": [path for path in paths if os.path.lexists(path)]}

    def check(self, needed: dict[str, int]) -> dict[str, Any]:
        """Return the blocks that are here of each copy, and None for a complete one.

        Args:
            needed: The bytes that each copy takes on the disk, by name.
        """
        folder = self._copies.folder
        if sum(path.name.startswith(self._marks) for path in folder.iterdir()) > 1:
            raise CopyError(f"other hosts share {folder}; name a folder that is on each host's own disk by --stage-dir")
        blocks = {name: self._blocks(name) for name in needed}
        rest = sum(needed[name] - done * BLOCK_BYTES for name, done in blocks.items() if done is not None)
        free = shutil.disk_usage(folder).free
        if rest > free:
            raise CopyError(
                f"{folder} has {free / 1e9:.1f} GB free, and the copies need {rest / 1e9:.1f} GB; free some, or choose "
                "another folder by --stage-dir"
            )
        ports = {each.getsockname()[0]: each.getsockname()[1] for each in self._listeners}
        return {"blocks": blocks, "listeners": ports}

    def _blocks(self, name: str) -> int | None:
        if self._copies.find(name):
            return None
        if draft := self._copies.unfinished(name):
            self._drafts[name] = draft
            return draft.blocks
        return 0

    def copy(
        self,
        name: str,
        first: int,
        upstream: dict[str, int],
        neighbors: tuple[str, str],
        report: Callable[[int], None],
    ) -> dict[str, Any]:
        """Take part in making copies, from block `first` on.

        Args:
            upstream: The previous host's addresses and ports; empty at the host that reads the source, or its own copy.
            neighbors: The names of the previous host and of the next one; empty without one.
            report: Called with the number of blocks that are done.
        """
        previous, following = neighbors
        if upstream:
            manifest, blocks = _receive(self._connect(upstream, previous), previous, name, first)
        else:
            manifest, blocks = self._read(name, first)
        send = _sender(self._accept_next(following), following, manifest) if following else None
        draft, reported = self._drafts.pop(name, None), time.monotonic()
        try:
            if draft is None and name not in self._copies.locks:
                draft = self._copies.begin(manifest)
            for number, block in enumerate(blocks, first):
                if send:
                    send(block)
                if draft and number >= draft.blocks:
                    draft.write(block)
                if time.monotonic() - reported > REPORT_SECONDS:
                    report(number + 1)
                    reported = time.monotonic()
            if draft:
                self._copies.finish(draft)
        except OSError as error:
            if draft:
                draft.discard()
            why = f"{self._copies.folder} cannot be written: {error.strerror or error}"
            raise CopyError(f"{why}; choose another folder by --stage-dir") from None
        if send:
            send(None)
        return {}

    def _read(self, name: str, first: int) -> tuple[CopyManifest, Iterator[Block]]:
        """Return the manifest and the blocks of the source, or of its copy here."""
        if name not in self._copies.locks:
            manifest = self._manifests[name]
            return manifest, copies.read_blocks(manifest.root, manifest, first)
        folder = self._copies.folder / name
        manifest = CopyManifest.unpack((folder / copies.MANIFEST).read_bytes())
        return manifest, self._read_copy(folder, manifest, first)

    def _read_copy(self, folder: Path, manifest: CopyManifest, first: int) -> Iterator[Block]:
        digests = (folder / copies.DIGESTS).read_bytes()
        blocks = copies.read_blocks(copies.files_of(folder, manifest), manifest, first, is_copy=True)
        for number, block in enumerate(blocks, first):
            if block.digest != digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
                raise CopyError(f"{folder} is damaged; remove it")
            yield block

    def _connect(self, upstream: Mapping[str, int], host: str) -> socket.socket:
        """Connect to the previous host, which may have addresses that are another machine's here."""
        for address, port in upstream.items():
            with suppress(OSError):
                connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
                with suppress(OSError):
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
        while True:
            with suppress(OSError):  # too many open files, for example
                connection, _ = listener.accept()
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
                continue
            time.sleep(REPORT_SECONDS)

    def _admit(self, connection: socket.socket) -> None:
        """Keep the connection of the next host; close those of peers that do not know the job's secret."""
        with suppress(OSError):
            connection.settimeout(CONNECT_SECONDS)
            challenges = _exactly(connection, CHALLENGE_BYTES) + (own := secrets.token_bytes(CHALLENGE_BYTES))
            connection.sendall(own + proof(self._secret, "sends a copy", challenges))
            answer = _exactly(connection, PROOF_BYTES)
            if hmac.compare_digest(answer, proof(self._secret, "receives a copy", challenges)):
                connection.settimeout(STALL_SECONDS)
                self._accepted.put(connection)
                return
        connection.close()

    def _accept_next(self, host: str) -> socket.socket:
        try:
            return self._accepted.get(timeout=STALL_SECONDS)
        except queue.Empty:
            raise PeerError(f"{host} has not connected within {STALL_SECONDS:g} s") from None


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


def _receive(connection: socket.socket, host: str, name: str, first: int) -> tuple[CopyManifest, Iterator[Block]]:
    """Return the manifest that the previous host sends, and the blocks that follow it."""
    manifest = CopyManifest.unpack(_receive_block(connection, host).data)
    if manifest.name != name:
        raise CopyError(f"{host} sends another copy; start the job again")
    return manifest, (_receive_block(connection, host) for _ in range(first, manifest.blocks))


def _receive_block(connection: socket.socket, host: str) -> Block:
    try:
        length, expected = HEAD.unpack(_exactly(connection, HEAD.size))
        block = copies.block_of(_exactly(connection, length))
    except TimeoutError:
        raise PeerError(f"{host} has sent nothing for {STALL_SECONDS:g} s") from None
    except OSError as error:
        raise PeerError(f"lost the connection to {host}: {error}") from None
    if block.digest != expected:
        raise CopyError(f"a block was damaged on its way from {host}; start the job again")
    return block


def _sender(connection: socket.socket, host: str, manifest: CopyManifest) -> Callable[[Block | None], None]:
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

    send(copies.block_of(manifest.pack()))
    return send


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
            return {}
        case "scan":
            return stagers[0].scan(**question)
        case "check":
            return stagers[0].check(**question)
        case _:
            return stagers[0].copy(**question, report=report)


if __name__ == "__main__":
    main()
