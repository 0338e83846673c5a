"""Run commands in processes forked from a preloaded one and in new interpreters, to compare them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lockstep.launch.forking import forked_worker

DRIVER = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); sys.path.append({here!r}); from forked import serve; serve()"
)


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files, by their paths in a folder."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    errors: str


def serve() -> None:
    """Load the modules named by the arguments, then fork a process for each line of standard input."""
    sys.path.pop()
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    loaded = forked_worker.load(sys.argv[1:])
    replies.write(b"ready\n")
    while line := requests.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            requests.close()
            replies.close()
            for target, name in enumerate(("input", "output", "errors")):
                descriptor = os.open(request[name], os.O_RDONLY if target == 0 else os.O_WRONLY)
                os.dup2(descriptor, target)
                os.close(descriptor)
            return forked_worker.run(request["command"], request["environment"], request["folder"], loaded)
        _, status, used = os.wait4(child, 0)
        replies.write(b"%d %d\n" % (os.waitstatus_to_exitcode(status), used.ru_minflt))
    return None


def comparable(result: Result) -> Result:
    """Return a result without memory addresses."""
    output, errors = (re.sub(r"0x[0-9a-f]+", "0x", text) for text in (result.output, result.errors))
    return Result(result.code, output, errors)


class Preloaded:
    """A process that has imported modules and runs commands in forked children."""

    def __init__(self, process: subprocess.Popen[bytes], flags: Sequence[str], files: Path) -> None:
        self._process = process
        self._flags = list(flags)
        self._files = files
        self._is_ready = False
        self.pages = 0  # that the last forked process touched for the first time

    def run(
        self, *command: str, folder: Path, environment: Mapping[str, str] | None = None, given: str = os.devnull
    ) -> Result:
        self._wait()
        output, errors = (self._files / name for name in ("output", "errors"))
        output.write_text("")
        errors.write_text("")
        request: dict[str, Any] = {"command": command, "folder": str(folder), "environment": environment or _own()}
        request |= {"input": given, "output": str(output), "errors": str(errors)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        code, self.pages = map(int, self._line().split())
        return Result(code, output.read_text(), errors.read_text())

    def run_really(
        self, *command: str, folder: Path, environment: Mapping[str, str] | None = None, given: str = os.devnull
    ) -> Result:
        """Run the command in a new interpreter."""
        with Path(given).open() as file:
            done = subprocess.run(
                [sys.executable, *self._flags, *command],
                cwd=folder,
                env=environment or _own(),
                stdin=file,
                capture_output=True,
                text=True,
                check=False,
            )
        return Result(done.returncode, done.stdout, done.stderr)

    def _wait(self) -> None:
        if not self._is_ready:
            assert self._line() == b"ready\n"
            self._is_ready = True

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the preloaded process has exited"
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


@contextmanager
def preloaded(
    files: Path, *modules: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Preloaded]:
    """Start a process that imports these modules."""
    code = DRIVER.format(here=str(Path(__file__).parent))
    command = [sys.executable, *flags, "-c", code, *modules]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment or _own())
    with Preloaded(process, flags, files) as worker:
        yield worker


def _own() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
