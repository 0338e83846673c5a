"""The rendezvous of an elastic job: its workers ask the launcher for a place, and ask again after every change.

`horovodrun --min-np` serves one store for asking, and for each generation, which is a set of workers with its ranks,
one more that is closed when a worker of it dies: whoever waits there for the dead one gets an error at once. A worker's
name is its slot and how often the slot's worker has been replaced. torch is imported when a worker asks.
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
from lockstep.world.launcher_environment import Place

if TYPE_CHECKING:
    from torch.distributed import Store

REMOVED, ADDED = 1, 2  # what has happened to the hosts; both are 3
ADDRESS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
SLOT = ("HOROVOD_HOSTNAME", "HOROVOD_LOCAL_RANK")
LIFE = "TORCHELASTIC_RESTART_COUNT"  # how many workers the slot had before
CONNECTING = timedelta(seconds=20)  # to a store on this machine, which a busy one may not answer for 5 s
CHANGES = "changes"  # the key of all changes of the host set so far, as "1 2 1"


@dataclass(frozen=True)
class Generation:
    """A worker's place in a generation (they count from 1), and the store that this generation's workers share."""

    place: Place
    store: Store
    generation: int


@dataclass
class _Latest:
    """The meeting in which this process was last: what it must not be given again, and need not be told of."""

    generation: int = 0
    rank: int = 0
    size: int = 0
    changes: int = 0


_latest = _Latest()


def worker_name(host: str, slot: int | str, life: int | str) -> str:
    """A worker's name in the store."""
    return f"{host}/{slot}/{life}"


def ask_key(worker: str) -> str:
    """Where a worker asks for a place; the value is the generation it was in before, or 0."""
    return f"ask/{worker}"


def answer_key(worker: str, after: int) -> str:
    """Where the launcher answers the worker that was in generation `after`."""
    return f"answer/{worker}/{after}"


def meet(environment: Mapping[str, str] = os.environ) -> Generation:
    """Wait until the launcher has assigned this worker a place in a generation newer than the last it was in.

    An error of the meeting's store, or of a connection made through it, means that a worker of this generation has
    ended: meet again.

    Raises:
        WorldError: There was no place within HOROVOD_ELASTIC_TIMEOUT (600 s), or there is no launcher to ask.
        SystemExit: With code 0: the job has no more use for this worker.
    """
    missing = [name for name in (*ADDRESS, *SLOT) if name not in environment]
    if missing:
        raise WorldError(
            f"HOROVOD_ELASTIC is set, but not {', '.join(missing)}; start the job with horovodrun --min-np N"
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
            with suppress(RuntimeError):  # closed already, since a worker of this generation has died: ask again
                store = _client(host, answer["port"], CONNECTING)
    except RuntimeError as error:
        raise WorldError(
            f"the worker of slot {environment[SLOT[1]]} on {environment[SLOT[0]]} got no place in the job within "
            f"{timeout.total_seconds():g} s (HOROVOD_ELASTIC_TIMEOUT): {first_line(error)}"
        ) from error
    place = Place(
        rank=answer["rank"],
        size=answer["size"],
        local_rank=answer["local_rank"],
        local_size=answer["local_size"],
        node=answer["node"],
        launcher="horovodrun",
    )
    return Generation(place, store, answer["generation"])


def _ask(launcher: Store, worker: str, timeout: timedelta) -> dict[str, int]:
    """The launcher's answer to a worker that asks for a place."""
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
    """The number of the latest change of the host set, and what has changed after number `since`: ADDED | REMOVED.

    What this process's present generation was formed with is no news to it, whatever `since` says. Outside an elastic
    job (0, 0). Costs one read of the launcher's store.
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
    """This process's rank in the latest generation that it was in, and its size; zeros before the first."""
    return _latest.rank, _latest.size


@cache  # a connection of its own: one that waits elsewhere would hold this up
def _changes_store(host: str, port: int) -> Store:
    return _client(host, port, timedelta(seconds=60))


def _client(host: str, port: int, timeout: timedelta) -> Store:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timeout)
