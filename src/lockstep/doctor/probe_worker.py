"""What `lockstep doctor -H a,b` runs on each host: its facts, its clock, and the time of all-reduces between hosts.

One worker a host. They have the job's store in common. Gloo, or between GPUs their own library, joins only those that
are being measured, and that have reached each other before (Gloo itself would try for minutes, and name no host). Rank
0 prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.doctor.machine import examine
from lockstep.errors import LockstepError, first_line
from lockstep.launch.protocol.reachability import listen
from lockstep.world import accelerator
from lockstep.world.devices import GLOO
from lockstep.world.interfaces import VIRTUAL, addresses
from lockstep.world.launcher_environment import Place
from lockstep.world.rendezvous import open_store
from lockstep.world.store import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_SECONDS = 300.0  # within which the slowest host has to have imported torch
REACH_SECONDS = 5.0  # within which hosts that can reach each other at all have done so
REDUCE_SECONDS = 60.0
CLOCK_ROUNDS = 20
SMALL_ROUNDS, LARGE_ROUNDS = 50, 3
LARGE_BYTES = 4 << 20  # 0.7 s at 50 Mbit/s
LARGE_DEVICE_BYTES = 64 << 20  # 5 ms at 100 Gbit/s


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself.

    Args:
        host: Its name in the plan.
        versions: Lockstep's, Python's and torch's, by name.
        clock_seconds: By how much its clock is ahead of the first host's, give or take `clock_error_seconds`.
        interface: The one that Gloo uses; `others` are there besides, containers' bridges left out.
        remedies: What stands in the way of a job there, as `lockstep doctor` says it on that host.
        library: What carries its GPUs' tensors; "" where it has none.
    """

    host: str
    versions: dict[str, str]
    clock_seconds: float
    clock_error_seconds: float
    gpus: list[str]
    interface: str
    address: str
    others: list[str]
    remedies: list[str]
    library: str = ""


@dataclass(frozen=True)
class Link:
    """All-reduces between some hosts.

    Args:
        latency_seconds: The median time of one of 4 bytes.
        bits_per_second: What each host sends, and receives, in the best of some of 4 MiB; of 64 MiB between GPUs.
        error: Why there are no such figures; "" where there are.
        library: What has carried them: Gloo from memory to memory, or the GPUs' library between one GPU of each.
    """

    hosts: list[str]
    latency_seconds: float = 0.0
    bits_per_second: float = 0.0
    error: str = ""
    library: str = GLOO


def clock_offset(store: Store, place: Place) -> tuple[float, float]:
    """By how many seconds this host's clock is ahead of the first's, and how far from the truth that may be.

    The first host is asked for its time again and again, and its answer is taken for the middle of the wait; the
    quickest answer counts, which is wrong by half of its wait at most (Cristian, Probabilistic clock synchronization,
    1989). Rank 0 answers all others in turn.
    """
    if place.rank == 0:
        for rank in range(1, place.size):
            for number in range(CLOCK_ROUNDS):
                store.wait([f"clock/{rank}/{number}/asked"])
                store.set(f"clock/{rank}/{number}/told", repr(time.time()))
        return 0.0, 0.0
    offsets = []
    for number in range(CLOCK_ROUNDS):
        asked = time.time()
        store.set(f"clock/{place.rank}/{number}/asked", "")
        told = float(store.get(f"clock/{place.rank}/{number}/told"))
        heard = time.time()
        offsets.append(((heard - asked) / 2, (heard + asked) / 2 - told))
    error, offset = min(offsets)
    return offset, error


def out_of_reach(store: Store, place: Place, address: str) -> list[set[int]]:
    """For each host, the ranks of those whose addresses it cannot connect to; the same answer on every host."""
    with listen(address or LOOPBACK) as door:  # the kernel answers; nobody need accept
        store.set(f"door/{place.rank}", json.dumps(door.getsockname()[:2]))
        doors = [json.loads(store.get(f"door/{rank}")) for rank in range(place.size)]
        with ThreadPoolExecutor(32) as pool:
            reached = list(pool.map(_reaches, doors))
        store.set(f"reached/{place.rank}", json.dumps(reached))
        rows = [json.loads(store.get(f"reached/{rank}")) for rank in range(place.size)]
    return [{rank for rank, reached in enumerate(row) if not reached} for row in rows]


def _reaches(door: tuple[str, int]) -> bool:
    address, port = door
    try:
        socket.create_connection((address, port), timeout=REACH_SECONDS).close()
    except OSError:
        return False
    return True


def cut_links(hosts: Sequence[HostFacts], unreached: Sequence[Collection[int]]) -> list[Link]:
    """The pairs of hosts of which one does not reach the other."""
    links = []
    for a, b in combinations(range(len(hosts)), 2):
        ways = [(x, y) for x, y in ((a, b), (b, a)) if y in unreached[x]]
        if ways:
            error = ", ".join(f"{hosts[x].host} does not reach {hosts[y].address or hosts[y].host}" for x, y in ways)
            links.append(Link([hosts[a].host, hosts[b].host], error=error))
    return links


def measure(store: Store, name: str, hosts: Sequence[str], member: int, library: str = GLOO) -> Link:
    """All-reduces between `hosts`, of which this one is number `member`."""
    from torch.distributed import PrefixStore

    found: list[Link] = []
    work = threading.Thread(
        target=lambda: found.append(_measure(PrefixStore(name, store), list(hosts), member, library)), daemon=True
    )
    work.start()
    work.join(2 * REDUCE_SECONDS)  # a GPU's library may wait for ever
    if found:
        return found[0]
    return Link(list(hosts), error=f"no answer within {2 * REDUCE_SECONDS:.0f} s", library=library)


def _measure(store: Store, hosts: list[str], member: int, library: str) -> Link:
    import torch
    from torch.distributed import ProcessGroupGloo

    timeout = timedelta(seconds=REDUCE_SECONDS)
    device = torch.device("cpu") if library == GLOO else accelerator.current()
    large_bytes = LARGE_BYTES if library == GLOO else LARGE_DEVICE_BYTES
    try:
        group: Any  # its stub is empty
        if library == GLOO:
            group = ProcessGroupGloo(store, member, len(hosts), timeout)
        else:
            group = accelerator.group(store, member, len(hosts), device, timeout)
        small, large = torch.zeros(1, device=device), torch.zeros(large_bytes // 4, device=device)

        def reduce(tensor: torch.Tensor) -> None:
            group.allreduce([tensor]).wait()
            accelerator.synchronize(device)

        latency = median(_times(lambda: reduce(small), SMALL_ROUNDS))
        seconds = min(_times(lambda: reduce(large), LARGE_ROUNDS))
    except RuntimeError as error:
        return Link(hosts, error=first_line(error), library=library)
    sent_bits = 8 * large_bytes * 2 * (len(hosts) - 1) / len(hosts)
    return Link(hosts, latency, sent_bits / seconds, library=library)


def _times(work: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def circles(size: int) -> list[list[int]]:
    """Who is measured with whom, one after another: each host with the next, in a ring, and then all together."""
    if size < 3:
        return [list(range(size))] if size == 2 else []
    return [*([rank, (rank + 1) % size] for rank in range(size)), list(range(size))]


def facts(host: str, offset: float, error: float) -> HostFacts:
    """What there is on this host."""

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    known = addresses()
    return HostFacts(
        host,
        {"Lockstep": __version__, "Python": platform.python_version(), "torch": version("torch")},
        clock_seconds=offset,
        clock_error_seconds=error,
        gpus=accelerator.names(),
        interface=interface,
        address=next((address for name, address in known if name == interface), ""),
        others=sorted({name for name, _ in known if name != interface and not name.startswith(VIRTUAL)}),
        remedies=[f"{finding.subject}: {finding.remedy}" for finding in examine() if finding.remedy],
        library=accelerator.backend(kind) if (kind := accelerator.kind()) and accelerator.has_collectives(kind) else "",
    )


def probe(place: Place, store: Store) -> dict[str, Any]:
    """Everything of all hosts, on each of them."""
    offset, error = clock_offset(store, place)
    own = facts(os.environ.get("HOROVOD_HOSTNAME", platform.node()), offset, error)
    store.set(f"facts/{place.rank}", json.dumps(asdict(own)))
    hosts = [HostFacts(**json.loads(store.get(f"facts/{rank}"))) for rank in range(place.size)]
    unreached = out_of_reach(store, place, own.address)
    links = cut_links(hosts, unreached)
    for number, circle in enumerate(circles(place.size)):
        if any(unreached[rank] & set(circle) for rank in circle):
            continue
        of_gpus = {hosts[rank].library for rank in circle}
        for library in (GLOO, *(of_gpus if len(of_gpus) == 1 and "" not in of_gpus else ())):
            key = f"{library}/{number}"
            if place.rank in circle:
                member = circle.index(place.rank)
                link = measure(store, f"circle/{key}", [hosts[rank].host for rank in circle], member, library)
                store.set(f"link/{key}/{member}", json.dumps(asdict(link)))
            # The next ones wait until all of these have done: nobody else sends meanwhile.
            parts = [Link(**json.loads(store.get(f"link/{key}/{member}"))) for member in range(len(circle))]
            links.append(next((part for part in parts if part.error), parts[0]))
    return {"hosts": [asdict(host) for host in hosts], "links": [asdict(link) for link in links]}


def main() -> int:
    place = Place.from_environment()
    try:
        report = probe(place, open_store(place, STORE_SECONDS))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    if place.rank == 0:
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
