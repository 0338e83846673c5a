"""The checks of `lockstep doctor -H a,b`: facts of each host, links between them, and problems.

The launcher starts this module as a worker on each host, so a problem that prevents a job from starting is reported
with the same message and exit code as for a job.

The workers share the job's store. Each group of hosts is measured in its own process group, of Gloo or, between GPUs,
of the GPUs' backend. Hosts that cannot connect to each other are never put into one group, since Gloo would retry for
minutes without naming the host. Rank 0 prints the result as a line of JSON.
"""

from __future__ import annotations

import io
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from itertools import combinations, islice
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.diagnosis import publisher
from lockstep.errors import ConfigError, LockstepError, bit_rate, first_line, printable
from lockstep.launch.gpus_doctor import NO_ANSWER, within
from lockstep.launch.machine_doctor import examine
from lockstep.launch.nccl_log import NetworkInUse, read_nccl_log
from lockstep.launch.node.hardware import count_gpus
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.site_profiles import Site
from lockstep.launch.protocol.reachability import listen
from lockstep.world import accelerator
from lockstep.world.devices import GLOO, usable_cores
from lockstep.world.interfaces import LOOPBACK, VIRTUAL, addresses
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import exchange, open_store

if TYPE_CHECKING:
    from torch.distributed import Store

NCCL_LOG = "NCCL_DEBUG_FILE"
MAX_LINES = 2000
STORE_SECONDS = 300.0  # timeout for the slowest host to import torch
REACH_SECONDS = 5.0  # timeout for connecting to a host
REDUCE_SECONDS = 60.0
SMALL_ROUNDS, LARGE_ROUNDS = 50, 3
LARGE_BYTES = 4 << 20  # 0.7 s at 50 Mbit/s
LARGE_DEVICE_BYTES = 64 << 20  # 5 ms at 100 Gbit/s
MAX_LATENCY_SECONDS = 5e-3
MIN_BITS_PER_SECOND = 0.5e9  # half of Gigabit Ethernet
SLOW = 1 / 3  # share of the fastest pair's bandwidth
MODEL_BITS = 8 * 100e6  # the gradients of ResNet-50


@dataclass(frozen=True)
class HostFacts:
    """Facts of a host.

    Args:
        host: Its name in the plan.
        versions: Versions of Lockstep, Python and torch, by name.
        interface: The network interface that Gloo uses.
        others: Other interfaces, except container bridges.
        fixes: Problems and fixes that `lockstep doctor` reports on that host.
        library: Backend for its GPUs' tensors; "" if it has no GPUs.
    """

    host: str
    versions: dict[str, str]
    gpus: list[str]
    interface: str
    address: str
    others: list[str]
    fixes: list[str]
    library: str = ""


@dataclass(frozen=True)
class Link:
    """All-reduces between some hosts.

    Args:
        latency_seconds: Median time of an all-reduce of 4 bytes.
        bits_per_second: Rate at which each host sends, and receives, in the fastest of LARGE_ROUNDS all-reduces of
            4 MiB (64 MiB between GPUs).
        error: Why there are no measurements; "" if there are.
        library: Backend: Gloo between host memories, or the GPUs' backend between one GPU per host.
    """

    hosts: list[str]
    latency_seconds: float = 0.0
    bits_per_second: float = 0.0
    error: str = ""
    library: str = GLOO


@dataclass(frozen=True)
class Report:
    """The facts and links of all hosts, in the order of the plan.

    Args:
        nccl_log: What NCCL or RCCL has logged on all hosts while links between GPUs were measured.
    """

    hosts: Sequence[HostFacts]
    links: Sequence[Link]
    nccl_log: Sequence[str] = ()

    def network(self, site: Site | None) -> NetworkInUse | None:
        """Return the network between the GPUs, and what is wrong with it at a site; None if it was not used."""
        if not self.nccl_log:
            return None
        return read_nccl_log(self.nccl_log, site.plugin if site else (), site.interfaces if site else ())


def plan_probe(where: LaunchOptions) -> JobPlan:
    """Plan the job that checks the hosts, with one worker per host independent of slots.

    Raises:
        ConfigError: The options contradict each other, or are for nodes that are started manually.
    """
    if where.staging.stage:
        raise ConfigError("doctor copies no files; remove --stage")
    command = [where.python_of_workers, "-m", "lockstep.launch.hosts_doctor"]
    where = replace(where, preload=False)  # a single worker per host gains nothing from preloading
    plan = plan_from(where, None, command, os.environ, usable_cores(), count_gpus, names_of_this_machine())
    if plan.manual:
        raise ConfigError("doctor cannot be combined with --nodes or --dist-url; pass the hosts with -H")
    nodes = tuple(replace(node, workers=1) for node in plan.nodes)
    return replace(plan, nodes=nodes, notes=("one worker per host, independent of slots",))


def examine_hosts(plan: JobPlan) -> Report | int:
    """Run the plan; return the report or, if the job failed and printed why, the launcher's exit code."""
    from lockstep.launch.controller.job_series import JobSeries

    output = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(output)), JobSeries() as jobs:
        code = jobs.run(plan, OutputPlan(plan.workers, prefixed=False))
        lines = output.getvalue().splitlines()
    if code:
        return code
    report = json.loads(lines[-1])
    hosts, links = [HostFacts(**host) for host in report["hosts"]], [Link(**link) for link in report["links"]]
    return Report(hosts, links, report["nccl_log"])


def troubles(report: Report, site: Site | None = None) -> list[str]:
    """Return one line per problem, with its fix; empty if there is none."""
    lines = [f"{host.host}: {fix}" for host in report.hosts for fix in host.fixes]
    network = report.network(site)
    return [*lines, *_gpus(report.hosts), *_links(report), *(network.faults if network else ())]


def _gpus(hosts: Sequence[HostFacts]) -> Iterator[str]:
    most = max(hosts, key=lambda host: len(host.gpus))
    for host in hosts:
        if most.gpus and not host.gpus:
            yield (
                f"{host.host}: torch finds no GPU, while {most.host} has {len(most.gpus)}; compare `nvidia-smi` and "
                f"torch.version.cuda on both, remove this host, or add --device cpu"
            )


def _links(report: Report) -> Iterator[str]:
    fastest: dict[str, float] = {}
    for link in report.links:
        if len(link.hosts) == 2:
            fastest[link.library] = max(fastest.get(link.library, 0.0), link.bits_per_second)
    facts = {host.host: host for host in report.hosts}
    for link in report.links:
        names = " and ".join(link.hosts) if len(link.hosts) == 2 else "all hosts together"
        names += f" over {link.library}" if link.library != GLOO else ""
        other = sorted({name for host in link.hosts for name in facts[host].others})
        fix = f"try another network (--interface {' or '.join(other)})" if other else "check cable and switch"
        if link.error:
            yield f"{names}: no connection ({link.error}); check for a firewall between them, or {fix}"
            continue
        speed = link.bits_per_second
        if speed < MIN_BITS_PER_SECOND or (len(link.hosts) == 2 and speed < SLOW * fastest[link.library]):
            yield (
                f"{names}: {bit_rate(speed)} is slow: sending the gradients of a ResNet-50 takes "
                f"{MODEL_BITS / speed:.1f} s per step; {fix}"
            )
        if link.latency_seconds > MAX_LATENCY_SECONDS:
            yield (
                f"{names}: a small all-reduce takes {1000 * link.latency_seconds:.1f} ms; check whether the hosts are "
                f"busy, or choose hosts in the same network"
            )


def show(report: Report, site: Site | None = None) -> list[str]:
    """Print the tables and the problems; return the problems."""
    from rich.console import Console
    from rich.table import Table

    hosts = Table("host", "Lockstep", "Python", "torch", "GPUs", "interface", show_edge=False)
    for host in report.hosts:
        gpus = ", ".join(f"{host.gpus.count(name)} × {name}" for name in dict.fromkeys(host.gpus)) or "none"
        interface = f"{host.interface or 'any'} {host.address}".strip()
        hosts.add_row(host.host, *host.versions.values(), gpus, interface)
    links = Table("hosts", "backend", "small all-reduce", "bandwidth each way", show_edge=False)
    for link in report.links:
        names = "all together" if len(link.hosts) > 2 else " and ".join(link.hosts)
        figures = (f"{1000 * link.latency_seconds:.2f} ms", bit_rate(link.bits_per_second))
        links.add_row(names, link.library, *(("no connection", "") if link.error else figures))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # for a file or another program
    console.print(hosts)
    if report.links:
        console.print()
        console.print(links)
    console.print()
    if network := report.network(site):
        console.print(printable(f"Between GPUs: {network.describe()}"), highlight=False, markup=False)
    found = troubles(report, site)
    for line in found or ["No problems found."]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return found


def out_of_reach(store: Store, rank_info: RankInfo, address: str) -> list[set[int]]:
    """Return, for each host, the ranks that it cannot connect to (collective; the same result on every host)."""
    place = rank_info.rank, rank_info.size
    with listen(address or LOOPBACK) as listener:  # the kernel completes connections without accept()
        listeners = exchange(store, *place, listener.getsockname()[:2], "listener")
        with ThreadPoolExecutor(32) as pool:
            reached = list(pool.map(_reaches, listeners))
        rows = exchange(store, *place, reached, "reached")
    return [{rank for rank, reached in enumerate(row) if not reached} for row in rows]


def _reaches(listener: tuple[str, int]) -> bool:
    try:
        socket.create_connection(listener, timeout=REACH_SECONDS).close()
    except OSError:
        return False
    return True


def cut_links(hosts: Sequence[HostFacts], unreached: Sequence[Collection[int]]) -> list[Link]:
    """Return the pairs of hosts that cannot connect to each other, in one direction or both."""
    links = []
    for a, b in combinations(range(len(hosts)), 2):
        ways = [(x, y) for x, y in ((a, b), (b, a)) if y in unreached[x]]
        if ways:
            error = ", ".join(f"{hosts[x].host} cannot reach {hosts[y].address or hosts[y].host}" for x, y in ways)
            links.append(Link([hosts[a].host, hosts[b].host], error=error))
    return links


def measure(
    store: Store, name: str, hosts: Sequence[str], member: int, library: str = GLOO, seconds: float = REDUCE_SECONDS
) -> Link:
    """Measure all-reduces between `hosts`, each within `seconds`; this host has index `member`."""
    from torch.distributed import PrefixStore

    found = within(2 * seconds, lambda: _measure(PrefixStore(name, store), list(hosts), member, library, seconds))
    return found or Link(list(hosts), error=NO_ANSWER.format(2 * seconds), library=library)


def _measure(store: Store, hosts: list[str], member: int, library: str, seconds: float) -> Link:
    import torch
    from torch.distributed import ProcessGroupGloo

    timeout = timedelta(seconds=seconds)
    device = torch.device("cpu") if library == GLOO else accelerator.current()
    large_bytes = LARGE_BYTES if library == GLOO else LARGE_DEVICE_BYTES
    try:
        group: Any  # its stub is empty
        with publisher.joining():  # or the launcher would say that the workers did not work together
            if library == GLOO:
                group = ProcessGroupGloo(store, member, len(hosts), timeout)
            else:
                group = accelerator.group(store, member, len(hosts), device, timeout)
        small, large = torch.zeros(1, device=device), torch.zeros(large_bytes // 4, device=device)

        def reduce(tensor: torch.Tensor) -> None:
            group.allreduce([tensor]).wait()
            accelerator.synchronize(device)

        latency = median(_times(lambda: reduce(small), SMALL_ROUNDS))
        large_seconds = min(_times(lambda: reduce(large), LARGE_ROUNDS))
        if library != GLOO:
            group.shutdown()  # otherwise torch warns at the end
    except RuntimeError as error:
        return Link(hosts, error=first_line(error), library=library)
    sent_bits = 8 * large_bytes * 2 * (len(hosts) - 1) / len(hosts)
    return Link(hosts, latency, sent_bits / large_seconds, library=library)


def _times(work: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def groups(size: int) -> list[list[int]]:
    """Return the groups of ranks to measure, in order: each host with the next one in a ring, then all hosts."""
    if size < 3:
        return [list(range(size))] if size == 2 else []
    return [*([rank, (rank + 1) % size] for rank in range(size)), list(range(size))]


def facts(host: str) -> HostFacts:
    """Collect the facts of this host."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    known = addresses()
    return HostFacts(
        host,
        {"Lockstep": __version__, "Python": platform.python_version(), "torch": version("torch")},
        gpus=accelerator.names(),
        interface=interface,
        address=next((address for name, address in known if name == interface), ""),
        others=sorted({name for name, _ in known if name != interface and not name.startswith(VIRTUAL)}),
        fixes=[f"{finding.subject}: {finding.fix}" for finding in examine() if finding.fix],
        library=accelerator.backend(kind) if (kind := accelerator.kind()) and accelerator.has_collectives(kind) else "",
    )


def probe(rank_info: RankInfo, store: Store) -> dict[str, Any]:
    """Collect the facts and links of all hosts (collective); the result is the same on every host."""
    own, place = facts(os.environ.get("HOROVOD_HOSTNAME", platform.node())), (rank_info.rank, rank_info.size)
    hosts = [HostFacts(**each) for each in exchange(store, *place, asdict(own), "facts")]
    unreached = out_of_reach(store, rank_info, own.address)
    links = cut_links(hosts, unreached)
    for number, group in enumerate(groups(rank_info.size)):
        if any(unreached[rank] & set(group) for rank in group):
            continue
        of_gpus = {hosts[rank].library for rank in group}
        for library in (GLOO, *(of_gpus if len(of_gpus) == 1 and "" not in of_gpus else ())):
            key = f"{library}/{number}"
            if rank_info.rank in group:
                member = group.index(rank_info.rank)
                link = measure(store, f"group/{key}", [hosts[rank].host for rank in group], member, library)
                store.set(f"link/{key}/{member}", json.dumps(asdict(link)))
            # The next group waits until this one has finished, so that no other traffic disturbs it.
            parts = [Link(**json.loads(store.get(f"link/{key}/{member}"))) for member in range(len(group))]
            links.append(next((part for part in parts if part.error), parts[0]))
    log = [line for lines in exchange(store, *place, own_nccl_log(), "nccl") for line in lines]
    return {"hosts": [asdict(host) for host in hosts], "links": [asdict(link) for link in links], "nccl_log": log}


def own_nccl_log() -> list[str]:
    """Return what NCCL or RCCL has logged in this process."""
    try:
        with open(os.environ[NCCL_LOG], encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in islice(file, MAX_LINES)]
    except (KeyError, OSError):  # it was not used
        return []


def main() -> int:
    rank_info = RankInfo.from_environment()
    try:
        with TemporaryDirectory() as folder:
            os.environ |= {"NCCL_DEBUG": "INFO", NCCL_LOG: f"{folder}/nccl"}  # read when it is first used
            report = probe(rank_info, open_store(rank_info, STORE_SECONDS))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return error.exit_code
    if rank_info.rank == 0:
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
