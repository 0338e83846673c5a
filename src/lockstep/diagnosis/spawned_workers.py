"""Workers that a program starts itself, such as by `torch.multiprocessing.spawn`, within a worker of a job."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lockstep.diagnosis import FOLDER, MEASURE, MEASURE_SPAWNED, publisher
from lockstep.diagnosis.board import MET, BoardReader
from lockstep.errors import ConfigError
from lockstep.files.output import report_to_launcher

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch may then wait for a server at any address


def allow_groups(measure: Callable[[], None]) -> None:
    """Let this process create groups at other addresses than the launcher's; `measure` starts a study's measurement."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    rendezvous = getattr(c10d, "rendezvous", None)
    store_port, run_id = "HOROVOD_GLOO_RENDEZVOUS_PORT", os.environ.get("TORCHELASTIC_RUN_ID")
    is_launchers = os.environ.get("MASTER_PORT") == os.environ.get(store_port)
    if rendezvous is None or not (is_launchers or multiprocessing.parent_process()):  # torchrun's, for example
        return

    def meet(url: str, rank: int = -1, world_size: int = -1, **named: Any) -> Iterator[Any]:
        _check_place(rank, world_size)
        port, store = urlparse(url).port or os.environ.get("MASTER_PORT"), os.environ[AGENT_STORE]
        if str(port) != os.environ.get(store_port) and run_id == os.environ.get("TORCHELASTIC_RUN_ID"):
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


def _check_place(rank: int, size: int) -> None:
    """Raise ConfigError if each of several workers of the job starts workers itself, instead of being one."""
    place = [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")] if rank < 0 else [str(rank), str(size)]
    job, parent = [os.environ[name] for name in ("HOROVOD_RANK", "HOROVOD_SIZE")], multiprocessing.parent_process()
    if place == job or job[1] == "1" or not parent:
        return
    try:
        board = BoardReader(Path(os.environ[FOLDER]) / f"{job[0]}-{parent.pid}.board").read()
    except (OSError, ValueError, KeyError):  # the parent is not a worker, or no launcher watches it
        return
    if not board.flags & MET:
        error = ConfigError("the script starts its own workers: start it with python, or with -np 1")
        report_to_launcher(f"worker {job[0]}: error: {error}", False, error.exit_code, final=True)
        raise error
