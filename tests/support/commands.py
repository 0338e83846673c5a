"""Run commands in tests: in a folder, with captured output, until they exit or for the duration of a block.

Commands are forked from a process that has imported torch (`warm`). A test that needs a new interpreter, such as a test
of starting processes, must have the mark `cold`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import cold_starts
import gloo_hangs
import psutil
import pytest
from cold_starts import PROGRAMS
from time_limits import LIMIT_SECONDS, extended, wait_until

from lockstep.launch.forking.preloaded_process import receive, send

LOCKSTEP = (sys.executable, "-m", "lockstep")
HOROVODRUN = (sys.executable, "-m", "lockstep.cli.horovodrun")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe")
OPEN_MPI_5 = (str(Path(__file__).parents[2] / "build/open-mpi-5/bin/mpirun"), *OPEN_MPI[1:])  # by .ci/run
MPICH = ("mpirun.mpich",)
MPICH_5 = (str(Path(__file__).parents[2] / "build/mpich-5/bin/mpiexec"),)
INTEL_MPI = (str(Path(__file__).parents[2] / "build/intel-mpi/bin/mpiexec"),)
SERVER = "import sys; sys.path.pop(0); sys.path.append({here!r}); from warm import serve; serve()"
SHIM = Path(__file__).with_name("warm_shim.py")
SHARED = "PYTEST_WARM_ADDRESS"  # the process that has imported torch, if pytest-xdist's processes share one
Command = Sequence[str | Path]
Done = subprocess.CompletedProcess[str]


def of_one_thread(**variables: str) -> dict[str, str]:
    """Return `own_environment` for workers with one thread that choose their network interface themselves."""
    own = own_environment(OMP_NUM_THREADS="1", **variables)
    return {name: own[name] for name in own if not name.endswith("_SOCKET_IFNAME")}


def own_environment(**variables: str) -> dict[str, str]:
    """Return this environment with `variables`, without pytest's variables and the thread counts that conftest sets."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    own.pop("OMP_NUM_THREADS", None)
    return own | variables


def run(
    command: Command,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = LIMIT_SECONDS,
    cold: bool = False,
) -> Done:
    """Run a command until it exits, and capture both output streams."""
    (done,) = run_together([command], cwd, env, timeout, cold)
    return done


def code_of(command: Command, cwd: Path, output: IO[Any], errors: IO[Any], timeout: float = LIMIT_SECONDS) -> int:
    """Run a command with these streams until it exits; return its exit code."""
    job = _start(command, cwd, None, output, errors, cold=False)
    try:
        return job.wait(timeout)
    finally:
        job.end()


def run_together(
    commands: Sequence[Command],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = LIMIT_SECONDS,
    cold: bool = False,
) -> list[Done]:
    """Run several commands at once, like `run`."""
    with ExitStack() as stack:
        streams = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        jobs = []
        for command, (output, errors) in zip(commands, streams, strict=True):
            jobs.append(_start(command, cwd, env, output, errors, cold))
            stack.callback(jobs[-1].end)
        done = []
        for command, job, files in zip(commands, jobs, streams, strict=True):
            try:
                code = job.wait(timeout)
            except subprocess.TimeoutExpired as error:
                error.add_note("\n".join(map(_text, files)))
                raise
            done.append(Done([*map(str, command)], code, *map(_text, files)))
            gloo_hangs.note(done[-1].stderr)
        return done


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@contextmanager
def started(
    command: Command, cwd: Path, env: Mapping[str, str] | None = None, cold: bool = False, output: Path | None = None
) -> Iterator[Job]:
    """Run a command during the block, with both streams in one file; end all its processes when the block exits."""
    output = output or cwd / "output.txt"
    with output.open("w") as file:
        job = _start(command, cwd, env, file, file, cold)
    job.output = output
    try:
        yield job
    finally:
        job.end()


class Job(psutil.Process):
    """A running command."""

    output: Path
    """Where it prints to, if it was `started`."""

    def __init__(self, pid: int, wait: Callable[[float | None], int]) -> None:
        super().__init__(pid)
        self._code: int | None = None
        self._wait_for_code = wait

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command; return its exit code, or -N if signal N ended it.

        Raises:
            subprocess.TimeoutExpired: It is still running after this many seconds of an idle machine.
        """
        if self._code is None:
            self._code = self._wait_for_code(None) if timeout is None else extended(self._wait_for_code, timeout)
        return self._code

    def poll(self) -> int | None:
        """Return the exit code as `wait` does, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    @property
    def text(self) -> str:
        """Return the output so far."""
        return self.output.read_text()

    def wait_for(self, text: str, seconds: float = LIMIT_SECONDS) -> None:
        """Wait until the output contains this text."""
        self.wait_until(lambda: text in self.text, seconds)

    def wait_until(self, holds: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> Any:
        """Wait until the condition returns a true value, while the job runs; return that value."""

        def found() -> Any:
            value = holds()
            assert value or self.poll() is None, self.text
            return value

        return wait_until(found, seconds, lambda: self.text)

    def descendants(self) -> list[psutil.Process]:
        """Return all living descendants."""
        with suppress(psutil.NoSuchProcess):
            return self.children(recursive=True)  # type: ignore[no-any-return]
        return []

    def workers(self) -> list[psutil.Process]:
        """Return the living descendants that have a rank."""
        found = []
        for process in self.descendants():
            with suppress(psutil.Error):
                if "RANK" in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """Kill the command if it still runs, and descendants that do not exit with it."""
        if self.poll() is None:
            descendants = self.descendants()
            with suppress(psutil.NoSuchProcess):
                self.kill()
            self.wait(LIMIT_SECONDS)
            _, alive = psutil.wait_procs(descendants, timeout=10)  # a launcher's guard cleans up first
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, timeout=10)


def _start(
    command: Command, cwd: Path, env: Mapping[str, str] | None, output: IO[Any], errors: IO[Any], cold: bool
) -> Job:
    words = [*map(str, command)]
    environment = own_environment() if env is None else dict(env)
    job = None if cold else _fork(words, cwd, environment, output, errors)
    if job is None:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        job = Job(process.pid, process.wait)
    return job


def _fork(command: list[str], cwd: Path, environment: dict[str, str], output: IO[Any], errors: IO[Any]) -> Job | None:
    """Fork the command from the process that has imported torch; return None if the command cannot be forked."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_address())
    order = {"command": command, "environment": environment, "folder": str(cwd)}
    with open(os.devnull) as nothing:
        send(connection, order, [nothing.fileno(), output.fileno(), errors.fileno()])
    answer, _ = receive(connection)
    assert answer is not None, "the process that has torch loaded has ended"
    if "pid" not in answer:
        connection.close()
        cold_starts.reasons.append(answer["cold"])
        return None

    def wait(seconds: float | None) -> int:
        if not select.select([connection], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(command, seconds or 0)
        end, _ = receive(connection)
        assert end is not None, "the process that has torch loaded has ended"
        connection.shutdown(socket.SHUT_WR)
        assert not connection.recv(1)  # the process has exited
        connection.close()
        code: int = end["code"]
        return code

    return Job(answer["pid"], wait)


def _address() -> str:
    """Return the address of the process that has imported torch, which the first call starts."""
    return os.environ.get(SHARED) or _start_warm()


@cache
def _start_warm() -> str:
    folder = tempfile.mkdtemp(prefix="warm-")
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener, cold_starts.allowed():
        listener.bind(address)
        listener.listen(64)
        code = SERVER.format(here=str(Path(__file__).parent))
        words = [sys.executable, "-c", code, str(listener.fileno()), str(os.getpid())]
        environment, only = own_environment(OMP_NUM_THREADS="1"), [listener.fileno()]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, pass_fds=only,
            start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return address


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Import torch once for the programs that the processes of a test run start, which this one outlives."""
    os.environ[SHARED] = _start_warm()


def write_shims(folder: Path, *names: str) -> None:
    """Write stand-ins for the programs installed next to Python, which fork instead of starting it, for PATH."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"address": _address(), "programs": str(PROGRAMS)}))
    for name in names:
        (folder / name).write_text(f"#!{sys.executable} -IS\n{SHIM.read_text()}")
        (folder / name).chmod(0o755)
