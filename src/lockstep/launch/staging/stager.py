"""`python -m lockstep.launch.staging.stager`: one host's copies for a job.

The launcher (`lockstep.launch.staging.job_copies`) sends requests over standard streams, one JSON object a line, and
closes the streams at the end of the job; then the copies are removed. The first host reads the shared files. Each host
passes the stream on to the next one while it unpacks it, so the file server serves each byte once. Both sides of such a
connection first prove by an HMAC over challenges that they have the job's secret.

A lock file beside the folder of the copies has the host's name, and is locked until the process exits. If it is not,
the process was killed, and this host's next job removes the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from lockstep import __version__
from lockstep.config.values import NOTICE
from lockstep.errors import LockstepError, first_line
from lockstep.files.staged import copy_of
from lockstep.files.untrusted import parse_json
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, listen, proof
from lockstep.launch.staging.stage_options import ENVIRONMENT, PREFIX, environment_folders
from lockstep.launch.staging.tar_stream import CHUNK_BYTES, CopyError, SharedSource, pack, unpack
from lockstep.world.interfaces import addresses

STALL_SECONDS = 300.0  # without a byte from the previous host, or a byte that the next one accepts
CONNECT_SECONDS = 10.0
ADMIT_SECONDS = 5.0  # less, because the next host may wait behind another peer
SENDS, RECEIVES = "sends a copy", "receives a copy"
# Executed instead of this process, whose threads may still write to the folder. Folders in it may be read-only.
REMOVE = ("/bin/sh", "-c", '[ -L "$0" ] || chmod -R u+w "$0"; rm -rf "$0" "$0".*')


class PeerError(LockstepError):
    """Another host has disconnected or stalled; it reports the reason."""


def make_folder(folder: Path) -> None:
    """Create the folder of a job's copies, and remove the folders of jobs that were killed on this host.

    Raises:
        CopyError: It cannot be created, or another host has created it.
    """
    host = socket.gethostname()
    for lock in folder.parent.glob(f"{PREFIX}*.{host}"):
        with suppress(OSError), open(lock, "r+b") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                subprocess.run([*REMOVE, str(lock).removesuffix(f".{host}")], check=False)
    try:
        own = os.open(f"{folder}.{host}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: then the folder is never taken for an abandoned one
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.mkdir(mode=0o700)
    except OSError as error:
        with suppress(OSError):
            os.unlink(f"{folder}.{host}")
        if isinstance(error, FileExistsError):
            why = f"other hosts share {folder.parent}; name a folder that is on each host's own disk by --stage-dir"
            raise CopyError(why) from None
        why = f"{folder} cannot be created: {error.strerror}"
        raise CopyError(f"{why}; choose another folder by --stage-dir") from None


def accept(listeners: Sequence[socket.socket], secret: str) -> socket.socket:
    """Return the next host's connection, and disconnect other peers.

    Raises:
        PeerError: It does not connect.
    """
    with ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        while ready := select.select(listeners, [], [], STALL_SECONDS)[0]:
            with suppress(OSError):
                connection, _ = ready[0].accept()
                if _is_proven(connection, secret, SENDS, RECEIVES, ADMIT_SECONDS):
                    return connection
    raise PeerError(f"the next host has not connected within {STALL_SECONDS:g} s")


def connect(upstream: Mapping[str, int], host: str, secret: str) -> socket.socket:
    """Connect to the previous host by its addresses and ports; some may be another machine's here.

    Raises:
        CopyError: It cannot be reached.
    """
    for address in upstream.items():
        with suppress(OSError):
            connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
            if _is_proven(connection, secret, RECEIVES, SENDS, CONNECT_SECONDS):
                return connection
    raise CopyError(
        f"cannot reach {host} at any of its addresses ({', '.join(upstream)}); is there a firewall between them? "
        "--interface names the network to use"
    )


def _is_proven(connection: socket.socket, secret: str, own_role: str, other_role: str, seconds: float) -> bool:
    """Prove the secret to a peer, and return whether it has it, too; close the connection if it has not."""
    is_proven = False
    with suppress(OSError):
        connection.settimeout(seconds)
        connection.sendall(own := secrets.token_bytes(CHALLENGE_BYTES))
        connection.sendall(proof(secret, own_role, _exactly(connection, CHALLENGE_BYTES)))
        expected = proof(secret, other_role, own)
        is_proven = hmac.compare_digest(_exactly(connection, len(expected)), expected)
        connection.settimeout(STALL_SECONDS)
    if not is_proven:
        connection.close()
    return is_proven


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("disconnected")
        data += part
    return data


class PassedStream:
    """A stream that is passed on to the next host as it is read. `sha256` and `size` count the bytes so far.

    Args:
        receive: Returns at most so many bytes; none at the end.
        following: The connection to the next host.
        names: The previous host and the next one.
    """

    def __init__(self, receive: Callable[[int], bytes], following: socket.socket | None, names: Sequence[str]) -> None:
        self._receive, self._following, self._names = receive, following, names
        self.sha256 = hashlib.sha256()
        self.size = 0

    def read(self, size: int, /) -> bytes:
        peer = self._names[0]
        try:
            data = self._receive(size)
            peer = self._names[1]
            if self._following:
                self._following.sendall(data)
        except OSError as error:
            raise PeerError(f"lost the connection to {peer}: {error}") from None
        self.sha256.update(data)
        self.size += len(data)
        return data


class Stager:
    """This host's copies, and its part in making them."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(32)
        self.folder: Path | None = None
        self._sources: list[SharedSource] = []
        self._has_copies = False
        self._secret = ""
        self._following: Future[socket.socket] | None = None

    def prepare(
        self, version: str, secret: str, folder: str, interfaces: list[str], has_next: bool
    ) -> dict[str, dict[str, int]]:
        """Create the folder, unless the copies are in it; return the addresses that listen for the next host."""
        if version != __version__:
            raise CopyError(f"Lockstep {__version__} is installed there, unlike the launcher's version")
        if not self.folder:
            make_folder(Path(folder))
            self.folder = Path(folder)
        self._secret, self._following, listeners = secret, None, []
        if has_next:
            for _, address in addresses(interfaces):
                with suppress(OSError):  # an address that cannot be bound is not reachable either
                    listeners.append(listen(address))
            self._following = self.pool.submit(accept, listeners, secret)
        return {"ports": {each.getsockname()[0]: each.getsockname()[1] for each in listeners}}

    def find(self, sources: list[str], python_path: str, paths: list[str]) -> dict[str, dict[str, str]]:
        """Find the sources; return their copies, and those of `paths` that exist in them."""
        assert self.folder
        found: dict[str, tuple[str, ...]] = {source: () for source in sources if source != ENVIRONMENT}
        environment = environment_folders([*python_path.split(":"), *sys.path]) if ENVIRONMENT in sources else {}
        if ENVIRONMENT in sources and not environment:
            raise CopyError("all packages of this Python are in /usr, on the host's own disk; remove `environment`")
        copies: dict[str, str] = {}
        for path, left_out in {**found, **environment}.items():
            root = os.path.realpath(path)
            if not os.path.isdir(root) and not os.path.isfile(root):
                raise CopyError(f"{path} does not exist, or is neither a file nor a folder")
            copies[path] = str(self.folder / str(len(copies)) / os.path.basename(root))
            own = os.path.realpath(self.folder)  # not in most sources
            inside = tuple(os.path.join(root, each) for each in left_out)
            self._sources.append(SharedSource(root, (*inside, own), path in environment))
        given = {path: copies[path] for path in found}
        existing = [path for path in paths if os.path.isabs(path) and os.path.lexists(path)]
        return {"copies": copies, "named": {path: copy for path in existing if (copy := copy_of(path, given))}}

    def copy(self, upstream: dict[str, int], neighbors: list[str]) -> dict[str, Any]:
        """Take part in making the copies; return the stream's size and SHA-256.

        Args:
            upstream: The previous host's addresses and ports; empty at the host that reads the sources, or its copies.
            neighbors: The names of the previous host and of the next one; empty without one.
        """
        assert self.folder
        with ExitStack() as opened:
            packing: Future[None] | None = None
            receive: Callable[[int], bytes]
            if upstream:
                receive = opened.enter_context(connect(upstream, neighbors[0], self._secret)).recv
            else:
                packed, source = os.pipe()
                with suppress(OSError, AttributeError):  # Linux; 64 KB take a quarter more time
                    fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
                packing = self.pool.submit(_pack, self._own_copies() if self._has_copies else self._sources, source)
                receive = opened.enter_context(open(packed, "rb", buffering=0)).read
            following = opened.enter_context(self._following.result()) if self._following else None
            stream = PassedStream(receive, following, neighbors)
            try:
                if not self._has_copies:
                    unpack(stream, self.folder)
                while stream.read(CHUNK_BYTES):
                    pass
            except tarfile.TarError as error:
                opened.close()
                if packing:
                    packing.result()
                raise PeerError(f"the files were damaged on their way ({error}); start the job again") from None
            except OSError as error:
                why = f"{self.folder} cannot be written: {error.strerror or error}"
                raise CopyError(f"{why}; choose another folder by --stage-dir") from None
            if packing:
                packing.result()
        self._has_copies = True
        return {"size": stream.size, "sha256": stream.sha256.hexdigest()}

    def _own_copies(self) -> list[SharedSource]:
        """Return the copies here as sources. A copy of an environment can be written to."""
        assert self.folder
        folders = sorted(self.folder.glob("[0-9]*"), key=lambda folder: int(folder.name))
        copies = [next(folder.iterdir()) for folder in folders]
        return [SharedSource(os.path.realpath(copy), (), bool(copy.stat().st_mode & stat.S_IWUSR)) for copy in copies]


def _pack(sources: list[SharedSource], descriptor: int) -> None:
    with open(descriptor, "wb") as stream:
        pack(sources, stream)


def main() -> NoReturn:
    """Answer the launcher's requests until it closes the stream."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICE):
        signal.signal(number, signal.SIG_IGN)  # a batch system sends them before the workers stop
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not look like an answer
    stager = Stager()
    for line in requests:
        stager.pool.submit(_answer, stager, parse_json(line), answers)
    if stager.folder:
        os.execv(REMOVE[0], [*REMOVE, str(stager.folder)])
    os._exit(0)  # a thread may wait for another host


def _answer(stager: Stager, request: dict[str, Any], answers: IO[bytes]) -> None:
    number, what = request.pop("number"), request.pop("request")
    try:
        answer = getattr(stager, what)(**request)
    except LockstepError as error:
        answer = {"error": str(error), "is_consequence": isinstance(error, PeerError)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {first_line(error)}"}
    answers.write(json.dumps({"number": number, **answer}).encode() + b"\n")


if __name__ == "__main__":
    main()
