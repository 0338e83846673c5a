"""Workers that a program starts itself, such as by `torch.multiprocessing.spawn`, within a worker of a job."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lockstep.diagnosis import FOLDER, MEASURE, MEASURE_SPAWNED, publisher
from lockstep.diagnosis.board import MET, BoardReader
from lockstep.errors import ConfigError
from lockstep.files.output import report_to_launcher

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch may then wait for a server at any address


def refuse_copy() -> None:
    """Raise ConfigError if this process runs the script again only to define what it was sent, as loader processes do.

    They do so if they were not forked: with the methods "spawn" and "forkserver". The script would join the job twice.
    """
    from multiprocessing.spawn import get_preparation_data

    try:
        get_preparation_data("")  # raises before a script has been run again
    except RuntimeError:
        raise ConfigError(
            "a process that the script has started, such as a loader process, runs the script again, as it does by "
            'default from Python 3.14 on: put what is not a definition below `if __name__ == "__main__":`, or fork '
            'loader processes: DataLoader(..., multiprocessing_context="fork")'
        ) from None


def allow_groups(measure: Callable[[], None]) -> None:
    """Let this process create groups at other addresses than the launcher's; `measure` starts a study's measurement."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    rendezvous = getattr(c10d, "rendezvous", None)
    if rendezvous is None or not _has_own_error_file(os.environ):  # torchrun's, for example
        return
    start = dict(os.environ)

    def meet(url: str, rank: int = -1, world_size: int = -1, **named: Any) -> Iterator[Any]:
        job = {**start, **os.environ}  # scripts may have removed variables
        _check_place(job, rank, world_size)
        port, store = urlparse(url).port or job.get("MASTER_PORT"), os.environ.get(AGENT_STORE, "")
        if str(port) != job.get("HOROVOD_GLOO_RENDEZVOUS_PORT") and _has_own_error_file(job):
            os.environ[AGENT_STORE] = ""
        try:
            found = next(rendezvous(url, rank, world_size, **named))
        finally:
            os.environ[AGENT_STORE] = store
        if length := os.environ.pop(MEASURE_SPAWNED, ""):
            own, size = map(str, found[1:])
            os.environ.update({MEASURE: length, "RANK": own, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
            publisher.start(answers=False)
            if board := publisher.own_board():
                board.set_flag(MET)
            measure()
        yield found

    c10d.rendezvous = meet


def _has_own_error_file(environment: Mapping[str, str]) -> bool:
    """Whether the error file is that of Lockstep's launcher: an agent in a worker gives its processes another one."""
    folder, file = environment.get(FOLDER, ""), environment.get("TORCHELASTIC_ERROR_FILE", "")
    return bool(folder) and Path(file).is_relative_to(Path(folder).parent)


def _check_place(job: Mapping[str, str], rank: int, size: int) -> None:
    """Raise ConfigError if each of several workers of the job starts workers itself, instead of being one."""
    own = [job.get("RANK"), job.get("WORLD_SIZE")] if rank < 0 else [str(rank), str(size)]
    if own[1] != "1":
        refuse_copy()
    place, parent = [job["HOROVOD_RANK"], job.get("HOROVOD_SIZE", "1")], multiprocessing.parent_process()
    if own == place or "1" in (own[1], place[1]) or not parent:
        return
    try:
        board = BoardReader(Path(job[FOLDER]) / f"{place[0]}-{parent.pid}.board").read()
    except (OSError, ValueError):  # the parent is not a worker, or no launcher watches it
        return
    if not board.flags & MET:
        error = ConfigError("the script starts its own workers: start it with python, or with -np 1")
        report_to_launcher(f"worker {place[0]}: error: {error}", False, error.exit_code, final=True)
        raise error
