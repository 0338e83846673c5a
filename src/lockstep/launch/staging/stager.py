"""`python -m lockstep.launch.staging.stager`: one host's copies for a job.

The launcher (`lockstep.launch.staging.job_copies`) sends requests over standard streams, one JSON object a line, and
closes the streams at the end of the job; then the copies are removed. The first host reads the shared files. Each host
passes the stream on to the next one while it unpacks it, so the file server serves each byte once. The stream ends with
its SHA-256.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import stat
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO, Any, NoReturn

from lockstep import __version__
from lockstep.config.values import NOTICE
from lockstep.errors import LockstepError, first_line
from lockstep.files.untrusted import parse_json
from lockstep.launch.staging.copies_folder import CopiesFolder
from lockstep.launch.staging.neighbors import NextHost, PeerError, connect, received, sender
from lockstep.launch.staging.stage_options import CACHES, ENVIRONMENT, environment_folders
from lockstep.launch.staging.tar_stream import CopyError, SharedSource, pack, unpack

REPORT_SECONDS = 1.0


class Stager:
    """This host's copies, and its part in making them."""

    def __init__(self) -> None:
        self._folder: CopiesFolder | None = None
        self._sources: list[SharedSource] = []
        self._has_copies = False
        self._secret = ""
        self._next: NextHost | None = None

    def close(self) -> None:
        if self._folder:
            self._folder.remove()

    def prepare(
        self, version: str, secret: str, folder: str, interfaces: list[str], has_next: bool
    ) -> dict[str, dict[str, int]]:
        """Create the folder, unless the copies are in it; return the addresses that listen for the next host."""
        if version != __version__:
            raise CopyError(f"Lockstep {__version__} is installed there, unlike the launcher's version")
        self._folder = self._folder or CopiesFolder(folder)
        for cache in CACHES.values():
            (self._folder.path / "caches" / cache).mkdir(parents=True, exist_ok=True)
        if self._next:  # of a chain that was interrupted
            self._next.close()
        self._secret, self._next = secret, NextHost(secret, interfaces) if has_next else None
        return {"ports": self._next.ports if self._next else {}}

    def find(self, sources: list[str], python_path: str, paths: list[str]) -> dict[str, Any]:
        """Find the sources; return the copy of each path, and which of `paths` exist."""
        assert self._folder
        found: dict[str, tuple[str, ...]] = {source: () for source in sources if source != ENVIRONMENT}
        environment = environment_folders([*python_path.split(":"), *sys.path]) if ENVIRONMENT in sources else {}
        if ENVIRONMENT in sources and not environment:
            raise CopyError("all packages of this Python are in /usr, on the host's own disk; remove `environment`")
        copies: dict[str, str] = {}
        self._sources = []
        for path, left_out in {**found, **environment}.items():
            root = os.path.realpath(path)
            if not os.path.isdir(root) and not os.path.isfile(root):
                raise CopyError(f"{path} does not exist, or is neither a file nor a folder")
            copies[path] = str(self._folder.path / str(len(copies)) / os.path.basename(root))
            own = os.path.relpath(os.path.realpath(self._folder.path), root)  # leads out of most sources
            self._sources.append(SharedSource(root, (*left_out, own), path in environment))
        return {"copies": copies, "existing": [path for path in paths if os.path.lexists(path)]}

    def copy(
        self, upstream: dict[str, int], neighbors: tuple[str, str], report: Callable[[int], None]
    ) -> dict[str, int]:
        """Take part in making the copies; return the number of files and their bytes.

        Args:
            upstream: The previous host's addresses and ports; empty at the host that reads the sources, or its copies.
            neighbors: The names of the previous host and of the next one; empty without one.
            report: Called regularly with the number of bytes so far.
        """
        previous, following = neighbors
        with ExitStack() as connections:
            if upstream:
                chunks = received(connections.enter_context(connect(upstream, previous, self._secret)), previous)
            else:
                chunks = pack(self._own_copies() if self._has_copies else self._sources)
            send = None
            if self._next:
                send = sender(connections.enter_context(self._next.accept(following)), following)
            stream = _Stream(chunks, send, report)
            files, size = (0, 0) if self._has_copies else self._unpack(stream)
            stream.finish()
        self._has_copies = True
        return {"files": files, "bytes": size}

    def _own_copies(self) -> list[SharedSource]:
        """Return the copies here as sources; that of an environment can be written to."""
        assert self._folder
        folders = sorted(int(each.name) for each in self._folder.path.iterdir() if each.name.isdecimal())
        copies = [next((self._folder.path / str(number)).iterdir()) for number in folders]
        return [SharedSource(os.path.realpath(copy), (), bool(copy.stat().st_mode & stat.S_IWUSR)) for copy in copies]

    def _unpack(self, stream: _Stream) -> tuple[int, int]:
        assert self._folder
        try:
            return unpack(stream, self._folder.path)
        except tarfile.TarError as error:
            raise CopyError(f"the files were damaged on their way ({error}); start the job again") from None
        except OSError as error:
            why = f"{self._folder.path} cannot be written: {error.strerror or error}"
            raise CopyError(f"{why}; choose another folder by --stage-dir") from None


class _Stream:
    """A stream as a file, whose chunks are passed on to the next host as they are read."""

    def __init__(
        self, chunks: Iterator[bytes], send: Callable[[bytes], None] | None, report: Callable[[int], None]
    ) -> None:
        self._chunks = chunks
        self._send = send
        self._report = report
        self._rest = bytearray()
        self._bytes = 0
        self._has_ended = False
        self._reported = time.monotonic()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := self._next()):
            self._rest += chunk
        data = bytes(self._rest[:size])
        del self._rest[:size]
        return data

    def finish(self) -> None:
        """Read the whole stream, and wait until all has been sent."""
        while self._next():
            pass

    def _next(self) -> bytes:
        if self._has_ended:
            return b""
        chunk = next(self._chunks, b"")
        self._has_ended = not chunk
        if self._send:
            self._send(chunk)
        self._bytes += len(chunk)
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._report(self._bytes)
            self._reported = time.monotonic()
        return chunk


def main() -> NoReturn:
    """Answer the launcher's requests until it closes the stream."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICE):
        signal.signal(number, signal.SIG_IGN)  # of a batch system, whose workers may need the copies until they stop
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not look like an answer
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stager = Stager()
    threading.Thread(target=_answer_all, args=(lines, answers, stager), daemon=True).start()
    for line in requests:
        lines.put(line)
    stager.close()
    os._exit(0)  # a thread may wait for another host


def _answer_all(lines: queue.SimpleQueue[bytes], answers: IO[bytes], stager: Stager) -> None:
    while True:
        request = parse_json(lines.get())
        number, what = request.pop("number"), request.pop("request")

        def say(number: int = number, **answer: Any) -> None:
            answers.write(json.dumps({"number": number, **answer}).encode() + b"\n")

        try:
            if what == "copy":
                request["report"] = lambda done: say(done=done)
            say(**getattr(stager, what)(**request))
        except LockstepError as error:
            say(error=str(error), is_consequence=isinstance(error, PeerError))
        except Exception as error:
            say(error=f"{type(error).__name__}: {first_line(error)}", is_consequence=False)


if __name__ == "__main__":
    main()
