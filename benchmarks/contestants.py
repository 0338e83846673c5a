"""Contestants that are separate programs: each is started once, in its own environment, and then runs in turns.

A program calls `take_turns` of `peers/turns.py`; between turns it waits on a socket without using a core.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from harness import Work

from lockstep.world.devices import usable_cores

HERE = Path(__file__).parent
START_SECONDS = 180.0
ADDRESS = "LOCKSTEP_BENCHMARK_SOCKET"


@contextmanager
def contestants(commands: Mapping[str, Sequence[str]], workers: int = 1) -> Iterator[dict[str, Work]]:
    """Start the programs one after another, and stop them when the context exits.

    Args:
        workers: Number of workers of each program; they share the cores.

    Raises:
        RuntimeError: A program exited or did not connect in time; its output is printed first.
    """
    threads = max(1, usable_cores() // workers)
    with ExitStack() as started:
        works: dict[str, Work] = {}
        for name, command in commands.items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            program = _Program(name, command, threads, started.enter_context(tempfile.TemporaryFile()))
            started.callback(program.end)
            works[name] = program.turn
        yield works


class _Program:
    def __init__(self, name: str, command: Sequence[str], threads: int, output: IO[bytes]) -> None:
        self._name, self._output = name, output
        self._link: socket.socket | None = None  # until it has connected
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/turns")
            listener.listen()
            environment = os.environ | {ADDRESS: f"{folder}/turns", "OMP_NUM_THREADS": str(threads)}
            self._process = subprocess.Popen(
                command, cwd=HERE / "peers", env=environment, stdout=self._output, stderr=subprocess.STDOUT
            )
            try:
                self._link = self._accept(listener)
            except OSError:
                self._fail()

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.5)
        for _ in range(int(START_SECONDS / 0.5)):
            try:
                link, _ = listener.accept()
                link.settimeout(None)
                return link
            except TimeoutError:
                if self._process.poll() is not None:
                    break
        raise TimeoutError

    def turn(self) -> int:
        """Run one turn and return its units of work."""
        assert self._link is not None
        answer = b""
        try:
            self._link.sendall(b"!")
            while not answer.endswith(b"\n"):
                if not (part := self._link.recv(64)):
                    self._fail()
                answer += part
        except OSError:
            self._fail()
        return int(answer)

    def _fail(self) -> None:
        self.end()
        self._output.seek(0)
        print(self._output.read().decode(errors="replace"), file=sys.stderr)
        raise RuntimeError(f"{self._name} exited or did not start; see its output above")

    def end(self) -> None:
        """Close the connection, so that the program exits, and wait for it."""
        if self._link is not None:
            self._link.close()
        elif self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
