"""The checks of `lockstep doctor -H a,b`: facts of each host, links between them, and problems.

The launcher starts a worker on each host (`lockstep.launch.doctor.probe_worker`), so a problem that prevents a job from
starting is reported with the same message and exit code as for a job.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace

from lockstep.errors import ConfigError
from lockstep.launch.doctor.probe_worker import HostFacts, Link
from lockstep.launch.node.gpus import count_gpus
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.world.devices import GLOO
from lockstep.world.world import usable_cores

MAX_CLOCK_SECONDS = 0.5
MAX_LATENCY_SECONDS = 5e-3
MIN_BITS_PER_SECOND = 0.5e9  # half of Gigabit Ethernet
SLOW = 1 / 3  # share of the fastest pair's bandwidth
MODEL_BITS = 8 * 100e6  # the gradients of ResNet-50


@dataclass(frozen=True)
class Report:
    """The facts and links of all hosts, in the order of the plan."""

    hosts: Sequence[HostFacts]
    links: Sequence[Link]


def plan_probe(where: LaunchOptions) -> JobPlan:
    """Plan the job that checks the hosts, with one worker per host independent of slots.

    Raises:
        ConfigError: The options contradict each other, or are for nodes that are started manually.
    """
    command = [where.python or sys.executable, "-m", "lockstep.launch.doctor.probe_worker"]
    where = replace(where, preload=False)  # a single worker per host gains nothing from preloading
    plan = plan_from(where, None, command, os.environ, usable_cores(), count_gpus, names_of_this_machine())
    if plan.manual:
        raise ConfigError("doctor cannot be combined with --nodes or --dist-url; pass the hosts with -H")
    nodes = tuple(replace(node, workers=1) for node in plan.nodes)
    return replace(plan, nodes=nodes, notes=("one worker per host, independent of slots",))


def examine_hosts(plan: JobPlan) -> Report | int:
    """Run the plan; return the report or, if the job failed and printed why, the launcher's exit code."""
    from lockstep.launch.controller.job import run_job

    output = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(output)):
        code = run_job(plan, OutputPlan(plan.workers, prefixed=False))
        lines = output.getvalue().splitlines()
    if code:
        return code
    report = json.loads(lines[-1])
    return Report([HostFacts(**host) for host in report["hosts"]], [Link(**link) for link in report["links"]])


def troubles(report: Report) -> list[str]:
    """Return one line per problem, with its fix; empty if there is none."""
    lines = [f"{host.host}: {fix}" for host in report.hosts for fix in host.fixes]
    return [*lines, *_clocks(report.hosts), *_gpus(report.hosts), *_links(report)]


def _clocks(hosts: Sequence[HostFacts]) -> Iterator[str]:
    for host in hosts:
        if abs(host.clock_seconds) - host.clock_error_seconds > MAX_CLOCK_SECONDS:
            ahead = "ahead of" if host.clock_seconds > 0 else "behind"
            yield (
                f"{host.host}: its clock is {abs(host.clock_seconds):.1f} s {ahead} that of {hosts[0].host}, so "
                f"timestamps of logs and files do not match; enable NTP on both (timedatectl set-ntp true)"
            )


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
                f"{names}: {rate(speed)} is slow: sending the gradients of a ResNet-50 takes {MODEL_BITS / speed:.1f} "
                f"s per step; {fix}"
            )
        if link.latency_seconds > MAX_LATENCY_SECONDS:
            yield (
                f"{names}: a small all-reduce takes {1000 * link.latency_seconds:.1f} ms; check whether the hosts are "
                f"busy, or choose hosts in the same network"
            )


def rate(bits_per_second: float) -> str:
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:.1f} Gbit/s"
    return f"{bits_per_second / 1e6:.0f} Mbit/s"


def show(report: Report) -> list[str]:
    """Print the tables and the problems; return the problems."""
    from rich.console import Console
    from rich.table import Table

    hosts = Table("host", "Lockstep", "Python", "torch", "clock", "GPUs", "interface", show_edge=False)
    for host in report.hosts:
        offset = f"{1000 * host.clock_seconds:+.1f} ± {1000 * host.clock_error_seconds:.1f} ms"
        gpus = ", ".join(f"{host.gpus.count(name)} × {name}" for name in dict.fromkeys(host.gpus)) or "none"
        interface = f"{host.interface or 'any'} {host.address}".strip()
        hosts.add_row(host.host, *host.versions.values(), offset, gpus, interface)
    links = Table("hosts", "backend", "small all-reduce", "bandwidth each way", show_edge=False)
    for link in report.links:
        names = "all together" if len(link.hosts) > 2 else " and ".join(link.hosts)
        figures = (f"{1000 * link.latency_seconds:.2f} ms", rate(link.bits_per_second))
        links.add_row(names, link.library, *(("no connection", "") if link.error else figures))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # for a file or another program
    console.print(hosts)
    if report.links:
        console.print()
        console.print(links)
    console.print()
    found = troubles(report)
    for line in found or ["No problems found."]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return found
