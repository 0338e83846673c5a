"""Running a command's work in its workers: in this process, in the launcher's, or in N that are started here."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError, LockstepError
from lockstep.world import Place, World, connect

INTERRUPTED = 130


def run_workers(
    command: str,
    words: Sequence[str],
    workers: int | Literal["auto"],
    device: Literal["auto", "cpu", "cuda"],
    work: Callable[[World], None],
    check: Callable[[int], None] = lambda size: None,
) -> int:
    """Do `work` in every worker of the job, and return this process's exit code.

    Inside a launcher such as torchrun this process is one of its workers. Otherwise `workers` of them are started,
    each with the same command line; a single one is this process itself.

    Args:
        check: Called with the number of workers before any is started; raises what should stop the job.
    """
    place = Place.from_environment()
    if place.launcher != "none":
        if workers not in (1, "auto", place.size):
            raise ConfigError(f"-np {workers}, but {place.launcher} has started {place.size} workers; leave -np out")
        return _work(place, device, work)
    if isinstance(workers, int) and workers < 1:
        raise ConfigError(f"-np is a number of workers, 1 or more, or auto; got {workers}")
    if workers == "auto":
        import torch

        workers = max(1, torch.cuda.device_count()) if device != "cpu" else 1
    check(workers)
    if workers == 1:
        return _work(place, device, work)
    return _launch(workers, [sys.executable, "-m", "lockstep", command, *words])


def _launch(workers: int, command: Sequence[str]) -> int:
    from lockstep.launch.plan import plan_local

    plan = plan_local(workers, command, len(os.sched_getaffinity(0)), os.environ)
    for note in plan.notes:
        print(note, flush=True)
    from lockstep.launch.agent import run_local

    return run_local(plan)


def _work(place: Place, device: Literal["auto", "cpu", "cuda"], work: Callable[[World], None]) -> int:
    try:
        with connect(place, device) as world:
            work(world)
    except KeyboardInterrupt:
        print("\nlockstep: interrupted; `--resume auto` goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _fail(place, error)
    return 0


def _fail(place: Place, error: Exception) -> int:
    """Tell the launcher, the worker's log and, where nobody else will, the terminal."""
    expected = isinstance(error, LockstepError)
    text = f"error: {error}" if expected else traceback.format_exc()
    logging.getLogger("lockstep").error(text)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and place.size > 1:
        _write_error_file(Path(error_file), f"worker {place.rank}: {text}")
    else:
        print(f"lockstep: {text}" if expected else text, file=sys.stderr)
    return error.exit_code if isinstance(error, LockstepError) else 1


def _write_error_file(path: Path, text: str) -> None:
    """Leave word in torchrun's form, and the exact time, for our launcher to find the first of several failures."""
    now = time.time_ns()
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(now // 10**9)}}
    path.write_text(json.dumps({"message": message, "lockstep": {"text": text, "time_ns": now}}))
