"""The examination behind `lockstep doctor -H a,b`: each host's facts, what is between them, and what is wrong.

The launcher starts a worker on each host (`lockstep.doctor.probe_worker`), so that what keeps a job from starting is
told here in the same words and with the same exit code.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace

from lockstep.doctor.probe_worker import HostFacts, Link
from lockstep.errors import ConfigError
from lockstep.launch.node.gpus import count_gpus
from lockstep.launch.output.display import OutputPlan
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.world.devices import GLOO
from lockstep.world.world import usable_cores

MAX_CLOCK_SECONDS = 0.5
MAX_LATENCY_SECONDS = 5e-3
MIN_BITS_PER_SECOND = 0.5e9  # half of what Gigabit Ethernet has
SLOW = 1 / 3  # of what the fastest two hosts have between them
MODEL_BITS = 8 * 100e6  # the gradients of ResNet-50


@dataclass(frozen=True)
class Report:
    """What the hosts have said, in the order of the plan."""

    hosts: Sequence[HostFacts]
    links: Sequence[Link]


def plan_probe(where: LaunchOptions) -> JobPlan:
    """The job that examines the hosts: one worker on each of them, whatever their slots.

    Raises:
        ConfigError: The options contradict each other, or are of nodes that are started by hand.
    """
    command = [where.python or sys.executable, "-m", "lockstep.doctor.probe_worker"]
    where = replace(where, preload=False)  # it needs torch alone, and shares it with nobody
    plan = plan_from(where, None, command, os.environ, usable_cores(), count_gpus, names_of_this_machine())
    if plan.by_hand:
        raise ConfigError("doctor goes to the hosts itself; name them by -H, not by --nodes or --dist-url")
    nodes = tuple(replace(node, workers=1) for node in plan.nodes)
    return replace(plan, nodes=nodes, notes=("one worker a host, whatever its slots",))


def examine_hosts(plan: JobPlan) -> Report | int:
    """Carry out the plan; the launcher's exit code where it fails, which it has then told of."""
    from lockstep.launch.controller.job import run_job

    told = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(told)):
        code = run_job(plan, OutputPlan(plan.workers, prefixed=False))
        lines = told.getvalue().splitlines()
    if code:
        return code
    report = json.loads(lines[-1])
    return Report([HostFacts(**host) for host in report["hosts"]], [Link(**link) for link in report["links"]])


def troubles(report: Report) -> list[str]:
    """What is wrong and how to mend it, a line each; none where all is well."""
    lines = [f"{host.host}: {remedy}" for host in report.hosts for remedy in host.remedies]
    return [*lines, *_clocks(report.hosts), *_gpus(report.hosts), *_links(report)]


def _clocks(hosts: Sequence[HostFacts]) -> Iterator[str]:
    for host in hosts:
        if abs(host.clock_seconds) - host.clock_error_seconds > MAX_CLOCK_SECONDS:
            ahead = "ahead of" if host.clock_seconds > 0 else "behind"
            yield (
                f"{host.host}: its clock is {abs(host.clock_seconds):.1f} s {ahead} that of {hosts[0].host}, which "
                f"mixes up logs and files' times: turn on NTP on both (timedatectl set-ntp true)"
            )


def _gpus(hosts: Sequence[HostFacts]) -> Iterator[str]:
    most = max(hosts, key=lambda host: len(host.gpus))
    for host in hosts:
        if most.gpus and not host.gpus:
            yield (
                f"{host.host}: torch sees no GPU there, but {len(most.gpus)} on {most.host}: compare `nvidia-smi` and "
                f"torch.version.cuda there, leave this host out, or add --device cpu"
            )


def _links(report: Report) -> Iterator[str]:
    fastest: dict[str, float] = {}
    for link in report.links:
        if len(link.hosts) == 2:
            fastest[link.library] = max(fastest.get(link.library, 0.0), link.bits_per_second)
    facts = {host.host: host for host in report.hosts}
    for link in report.links:
        names = " and ".join(link.hosts) if len(link.hosts) == 2 else "all hosts together"
        names += f" by {link.library}" if link.library != GLOO else ""
        other = sorted({name for host in link.hosts for name in facts[host].others})
        remedy = (
            f"try another network (--interface; there is {', '.join(other)})" if other else "check cable and switch"
        )
        if link.error:
            yield f"{names}: no connection ({link.error}): is there a firewall between them? Else {remedy}"
            continue
        speed = link.bits_per_second
        if speed < MIN_BITS_PER_SECOND or (len(link.hosts) == 2 and speed < SLOW * fastest[link.library]):
            yield (
                f"{names}: {rate(speed)} is slow; the gradients of a ResNet-50 take {MODEL_BITS / speed:.1f} s "
                f"a step: {remedy}"
            )
        if link.latency_seconds > MAX_LATENCY_SECONDS:
            yield (
                f"{names}: a small all-reduce takes {1000 * link.latency_seconds:.1f} ms: are the hosts busy, or far "
                f"from each other? Choose ones of the same network"
            )


def rate(bits_per_second: float) -> str:
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:.1f} Gbit/s"
    return f"{bits_per_second / 1e6:.0f} Mbit/s"


def show(report: Report) -> list[str]:
    """Print the tables and the verdict; the lines of what is wrong."""
    from rich.console import Console
    from rich.table import Table

    hosts = Table("host", "Lockstep", "Python", "torch", "clock", "GPUs", "interface", show_edge=False)
    for host in report.hosts:
        offset = f"{1000 * host.clock_seconds:+.1f} ± {1000 * host.clock_error_seconds:.1f} ms"
        gpus = ", ".join(f"{host.gpus.count(name)} × {name}" for name in dict.fromkeys(host.gpus)) or "none"
        way = f"{host.interface or 'any'} {host.address}".strip()
        hosts.add_row(host.host, *host.versions.values(), offset, gpus, way)
    links = Table("between", "by", "small all-reduce", "bandwidth each way", show_edge=False)
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
    for line in found or ["Nothing is wrong."]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return found
