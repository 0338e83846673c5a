"""The rendezvous of an elastic job: workers request rank info from the launcher, and again after every change.

`horovodrun --min-np` serves one store for requests. A generation is a set of workers with ranks, and has its own
store. The store is closed when one of its workers dies, so that peers that wait for this worker get an error
immediately. A worker's name consists of its slot and the number of earlier workers in the slot. torch is imported when
a worker sends a request.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from lockstep.errors import WorldError, first_line
from lockstep.world.launcher_environment import RESTART_COUNT, RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store

REMOVED, ADDED = 1, 2  # changes of the host set; 3 is both
ADDRESS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
SLOT = ("HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK")
LIFE = RESTART_COUNT  # here, the number of earlier workers in the slot
CONNECTING = timedelta(seconds=20)  # to a store on this machine, which may not answer for 5 s under load
CHANGES = "changes"  # key of all changes of the host set so far, such as "1 2 1"


@dataclass(frozen=True)
class Generation:
    """A worker's rank info in a generation (numbered from 1), and the store that its workers share."""

    rank_info: RankInfo
    store: Store
    generation: int


@dataclass
class _Latest:
    """The last generation of this process, and the host changes known at that time."""

    generation: int = 0
    rank: int = 0
    size: int = 0
    changes: int = 0


_latest = _Latest()


def worker_name(host: str, slot: int | str, life: int | str) -> str:
    """Return a worker's name in the store."""
    return f"{host}/{slot}/{life}"


def ask_key(worker: str) -> str:
    """Return the key of a worker's request; its value is the worker's previous generation, or 0."""
    return f"ask/{worker}"


def answer_key(worker: str, after: int) -> str:
    """Return the key of the launcher's answer to a worker that was in generation `after`."""
    return f"answer/{worker}/{after}"


def meet(environment: Mapping[str, str] = os.environ) -> Generation:
    """Wait until the launcher assigns this worker a rank in a newer generation than its last.

    If the generation's store, or a connection made through it, fails, a worker of this generation has exited: call
    this again.

    Raises:
        WorldError: No rank was assigned within HOROVOD_ELASTIC_TIMEOUT (600 s), or there is no launcher.
        SystemExit: With code 0, if the job no longer needs this worker.
    """
    missing = [name for name in (*ADDRESS, *SLOT) if name not in environment]
    if missing:
        raise WorldError(
            f"HOROVOD_ELASTIC is set, but {', '.join(missing)} is not; start the job with horovodrun --min-np N"
        )
    worker = worker_name(environment[SLOT[0]], environment[SLOT[1]], environment.get(LIFE, "0"))
    timeout = timedelta(seconds=float(environment.get("HOROVOD_ELASTIC_TIMEOUT") or 600))
    host, port = environment[ADDRESS[0]], int(environment[ADDRESS[1]])
    try:
        launcher = _client(host, port, timeout)
        deadline = time.monotonic() + timeout.total_seconds()
        store = None
        while store is None:
            answer = _ask(launcher, worker, timedelta(seconds=max(0.01, deadline - time.monotonic())))
            with suppress(RuntimeError):  # already closed because a worker of this generation died: ask again
                store = _client(host, answer["port"], CONNECTING)
    except RuntimeError as error:
        raise WorldError(
            f"the worker of slot {environment[SLOT[1]]} on {environment[SLOT[0]]} was not assigned a rank within "
            f"{timeout.total_seconds():g} s (HOROVOD_ELASTIC_TIMEOUT): {first_line(error)}"
        ) from error
    rank_info = RankInfo(
        rank=answer["rank"],
        size=answer["size"],
        local_rank=answer["local_rank"],
        local_size=answer["local_size"],
        node=answer["node"],
        launcher="horovodrun",
    )
    return Generation(rank_info, store, answer["generation"])


def _ask(launcher: Store, worker: str, timeout: timedelta) -> dict[str, int]:
    """Request rank info, and return the launcher's answer."""
    launcher.set(ask_key(worker), str(_latest.generation))
    key = answer_key(worker, _latest.generation)
    launcher.wait([key], timeout)
    answer: dict[str, int] = json.loads(launcher.get(key))
    if "generation" not in answer:
        raise SystemExit(0)
    _latest.generation, _latest.changes = answer["generation"], answer["changes"]
    _latest.rank, _latest.size = answer["rank"], answer["size"]
    return answer


def host_changes(since: int) -> tuple[int, int]:
    """Return the number of host changes so far, and the kinds of those after the first `since`: ADDED | REMOVED.

    Changes that this process's current generation already includes are left out, even if they are after `since`.
    Outside an elastic job, return (0, 0). Costs one read of the launcher's store.
    """
    if os.environ.get("HOROVOD_ELASTIC") != "1" or any(name not in os.environ for name in ADDRESS):
        return 0, 0
    store = _changes_store(os.environ[ADDRESS[0]], int(os.environ[ADDRESS[1]]))
    changes = [int(kind) for kind in store.get(CHANGES).split()]
    news = 0
    for kind in changes[max(since, _latest.changes) :]:
        news |= kind
    return len(changes), news


def latest_place() -> tuple[int, int]:
    """Return this process's rank in its latest generation, and the generation's size; zeros before the first."""
    return _latest.rank, _latest.size


@cache  # a separate connection, because another one may be blocked by a wait
def _changes_store(host: str, port: int) -> Store:
    return _client(host, port, timedelta(seconds=60))


def _client(host: str, port: int, timeout: timedelta) -> Store:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timeout)
