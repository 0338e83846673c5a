"""Fuzz parsers: `python tests/faults/fuzz/run.py --inputs 10000 [TARGET ...]`.

Each target has a process of its own unless --together. It fails on any error that is not the target's own, on more than
the target's processor time or memory for an input, on a crash of the process, and on any program started, connection
made or file written outside its folder. Prints a line a target; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

DEAD_SECONDS = 120  # of one input within C code, after which the process is ended
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pty.spawn",
    "socket.connect",
    "ctypes.dlopen",
)


class Canary:
    """Sees whether an input has got anything run."""

    def __init__(self, folder: Path) -> None:
        self.sung: list[str] = []
        self.listens = False
        self._folder = str(folder)
        (folder / "canary.py").write_text("raise SystemExit('executed')\n")
        sys.path.insert(0, str(folder))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.listens:
            return
        if event in FORBIDDEN or (event == "import" and arguments[0] == "canary"):
            self.sung.append(f"{event} {arguments!r:.200}")
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(arguments[0])
            if not path.startswith((self._folder, "/dev/null", tempfile.gettempdir())):
                self.sung.append(f"writes {path}")


class TooSlowError(BaseException):
    pass


def _late(number: int, frame: Any) -> None:
    raise TooSlowError


def fuzz(name: str, inputs: int, folder: Path, canary: Canary) -> str:
    """Feed a target; what went wrong, or nothing."""
    from targets import TARGETS

    place = folder / name
    place.mkdir()
    target = TARGETS[name](place)
    signal.signal(signal.SIGPROF, _late)
    counts = {"read": 0, "refused": 0}
    worst = [0.0]
    with suppress(*target.allowed):  # what is read for the first time imports what it needs
        target.read(target.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def feed(number: int) -> None:
        data = target.input(number)
        faulthandler.dump_traceback_later(DEAD_SECONDS, exit=True)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, target.seconds)
        canary.listens = True
        try:
            target.read(data)
            counts["read"] += 1
        except target.allowed:
            counts["refused"] += 1
        finally:
            canary.listens = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            (place / "last-input").write_bytes(data)
        worst[0] = max(worst[0], time.monotonic() - began)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert grown <= target.memory_bytes, f"memory grew by {grown:,} bytes"
        assert not canary.sung, canary.sung[0]

    began = time.monotonic()
    try:
        with warnings.catch_warnings(action="ignore"):
            for number in range(inputs):
                feed(number)
    except BaseException:
        kept = Path(tempfile.gettempdir()) / f"fuzz-{name}"
        kept.write_bytes((place / "last-input").read_bytes())
        return f"{traceback.format_exc(limit=-6)}\nthe input is {kept}"
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    took = time.monotonic() - began
    print(
        f"{name:24} {sum(counts.values()):6} inputs: {counts['read']:6} read, {counts['refused']:6} refused, 0 failed; "
        f"longest {1000 * worst[0]:.0f} ms, memory +{mib:.0f} MiB, {took:.0f} s in all",
        flush=True,
    )
    return ""


def _work(names: list[str], inputs: int) -> int:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        os.chdir(folder)
        canary = Canary(folder)
        for each in names:
            print(f"{each} ...", file=sys.stderr, flush=True)
            try:
                wrong = fuzz(each, inputs, folder, canary)
            except Exception:
                wrong = traceback.format_exc()
            if wrong:
                print(f"{each}: FAILED\n{wrong}", flush=True)
                failed += 1
        if (folder / "executed").exists():
            print("FAILED: an input was executed")
            failed += 1
    return failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--inputs", type=int, default=100)
    parser.add_argument("--together", action="store_true", help="all targets in one process")
    words = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    if words.together or len(words.targets) == 1:
        if not words.targets:
            from targets import TARGETS

            words.targets = list(TARGETS)
        return bool(_work(words.targets, words.inputs))
    names = words.targets
    if not names:
        from targets import TARGETS

        names = list(TARGETS)
    failed = []
    for name in names:
        command = [sys.executable, __file__, name, "--inputs", str(words.inputs)]
        done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            print(f"{name}: exit code {done.returncode}\n{done.stderr.decode(errors='replace')[-3000:]}", flush=True)
            failed.append(name)
    print(f"{len(names)} targets, failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
