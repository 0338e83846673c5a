"""A worker that needs no torch: `worker_script.py FOLDER [RANK:ACTION ...]`, with `*` for every rank.

It writes its variables and process ID to FOLDER/RANK.json, prints HERE, performs its actions, then waits until it is
stopped.

    raise       raises an exception that is not caught
    exit=N      exits with that code
    loader      starts a child in a separate process group, like a loader process; fails if it is killed
    stubborn    ignores SIGTERM and SIGINT, as do its children
    note        writes the names of signals that it receives to FOLDER/RANK.signals; SIGTERM ends it with code 75
    when=NAME   waits until FOLDER/NAME exists before the next actions
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

HERE = "a worker is here"  # printed, to show that the launcher receives the worker's output
STOPPED = 75  # exit code of workers that stop on request, as in Lockstep
PATIENCE_SECONDS = 240  # limit of every wait, in case the test fails


def main(folder: Path, actions: list[str]) -> None:
    rank = os.environ["RANK"]
    mine = [action.split(":", 1)[1] for action in actions if action.split(":", 1)[0] in (rank, "*")]
    facts = {"pid": os.getpid(), "host": Path("/proc/sys/kernel/hostname").read_text().strip(), "cwd": os.getcwd()}
    loader = 0
    if "stubborn" in mine:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "note" in mine:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: note(folder / f"{rank}.signals", number, frame))
    if "loader" in mine:
        loader = os.fork()
        if not loader:
            os.setpgid(0, 0)
            time.sleep(PATIENCE_SECONDS)
            os._exit(0)
    written = folder / f"{rank}.written"
    written.write_text(json.dumps({**facts, "loader": loader, "environment": dict(os.environ)}))
    written.rename(folder / f"{rank}.json")
    print(HERE, flush=True)
    for action in mine:
        name, _, value = action.partition("=")
        if name == "when":
            wait_for(folder / value)
        elif name == "raise":
            raise ValueError(f"boom on rank {rank}")
        elif name == "exit":
            sys.exit(int(value))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if loader and os.waitpid(loader, os.WNOHANG)[0]:
            raise RuntimeError(f"the loader process {loader} was killed")
        time.sleep(0.1)


def note(path: Path, number: int, frame: FrameType | None) -> None:
    with path.open("a") as file:
        print(signal.Signals(number).name, file=file)
    if number == signal.SIGTERM:
        os._exit(STOPPED)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
