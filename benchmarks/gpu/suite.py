"""Run the steps of the suite as separate processes, so that a failure, hang or full memory does not stop the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PART_SECONDS = 540.0  # one command on the machine with the GPU may take 10 minutes
STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
IMPORT_SECONDS = 10.0  # before a step starts its clock
ORIGINAL = "cifar-10-batches-py"  # in the folder that is passed; Lockstep compares the MD5 of each file


class Outcome(NamedTuple):
    """The outcome of a step: exit code (None: left out), whether it timed out, and its duration."""

    name: str
    code: int | None
    overtime: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.code is None:
            return "left out, for lack of time"
        how = "stopped: its time was over" if self.overtime else "done" if self.code == 0 else f"FAILED ({self.code})"
        return f"{how}, {self.seconds:.0f} s"


class Suite:
    """Runs the steps of parts until the time budget is used.

    Args:
        seconds: Time budget of all steps together.
    """

    def __init__(self, seconds: float) -> None:
        self._end = self._end_of_part = time.monotonic() + seconds
        self.outcomes: list[Outcome] = []

    def begin_part(self, reserved: float) -> None:
        """Limit the next steps to the time of a part; leave so many seconds to later parts."""
        self._end_of_part = min(time.monotonic() + PART_SECONDS, self._end - reserved)

    def left(self) -> float:
        """Return the part's remaining seconds."""
        return self._end_of_part - time.monotonic()

    def step(self, module: str, words: Sequence[str] = (), *, most: float, least: float = 40.0) -> Outcome:
        """Run `python -m gpu.MODULE WORDS` for at most `most` seconds, unless fewer than `least` are left.

        The module receives its time as --seconds, so that it can leave out parts of its work.
        """
        name = " ".join([module, *words])
        seconds = min(most, self.left())
        if seconds < least:
            outcome = Outcome(name, None)
        else:
            print(f"\n=== {name} (at most {seconds:.0f} s)", flush=True)
            start = time.monotonic()
            told = seconds - STOP_SECONDS - IMPORT_SECONDS
            command = [sys.executable, "-m", f"gpu.{module}", *words, "--seconds", f"{told:.0f}"]
            code, overtime = run_until(command, seconds)
            outcome = Outcome(name, code, overtime, time.monotonic() - start)
        print(f"=== {name}: {outcome}", flush=True)
        self.outcomes.append(outcome)
        return outcome


def run_until(
    command: Sequence[str], seconds: float, output: int | None = None, stop_seconds: float = STOP_SECONDS
) -> tuple[int, bool]:
    """Run a command in a new session for up to `seconds`; return its exit code, and whether it was stopped."""
    process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
    try:
        return process.wait(max(0.0, seconds - stop_seconds)), False
    except subprocess.TimeoutExpired:
        for kind, patience in ((signal.SIGTERM, stop_seconds), (signal.SIGKILL, None)):
            _signal_group(process, kind)
            try:
                return process.wait(patience), True
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError("a killed process has not ended") from None
    finally:
        _signal_group(process, signal.SIGKILL)  # workers that outlived their parent


def _signal_group(process: subprocess.Popen[bytes], kind: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, kind)


def children_find(device: str, staged: Path | None) -> None:
    """Set PYTHONPATH so that child processes import the suite, this checkout's Lockstep and the staged packages.

    With the device simgpu, torch loads the tests' simulated GPU in each of them.
    """
    folders = [ROOT / "benchmarks", ROOT / "src", ROOT / "compat" / "horovod" / "src"]
    if device == "simgpu":
        folders += [ROOT / "tests", ROOT / "tests" / "simgpu" / "autoload"]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    after = [str(staged)] if staged else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *filter(None, before), *after])
    os.environ["PYTHONUNBUFFERED"] = "1"


def find_cifar10(data: Path) -> Path | None:
    """Return the folder with CIFAR-10, or None; unpack an archive to the temporary folder first."""
    archives = [data] if data.is_file() else [*data.glob("cifar*10*.zip"), *data.glob("cifar*10*.tar.*")]
    folders = [data, data / "cifar10"]
    for archive in archives:
        target = Path(tempfile.gettempdir(), f"lockstep-gpu-suite-{archive.name}.unpacked")
        if not target.is_dir():
            trusted: dict[str, Any] = {} if archive.suffix == ".zip" else {"filter": "data"}
            shutil.unpack_archive(archive, target, **trusted)
        folders += [target, target / "cifar10"]
    return next((each for each in folders if is_original(each) or _has_images(each)), None)


def is_original(folder: Path) -> bool:
    return (folder / ORIGINAL).is_dir()


def _has_images(folder: Path) -> bool:
    return (folder / "train").is_dir() and (folder / "test").is_dir()
