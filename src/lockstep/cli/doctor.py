"""`lockstep doctor`: check this machine or a job's hosts, and print how to fix problems."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import arg
from lockstep.errors import ConfigError, printable
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.options import LaunchOptions
from lockstep.launch.plan.site_profiles import Site, find_site


@dataclass(frozen=True)
class DoctorCommand:
    """Check this machine, or the hosts of a job, and print how to fix each problem.

    With -H, --hostfile or --launcher, also check the hosts' network. The exit code is 1 if there is a problem.
    """

    where: LaunchOptions = field(default_factory=LaunchOptions)
    nccl_log: Annotated[Path | None, arg(metavar="FILE")] = None
    """Check the network in a job's log with NCCL_DEBUG=INFO instead."""
    json: bool = False
    """Print this machine's facts and checks as JSON, for a bug report."""


def main(arguments: Sequence[str]) -> int:
    command = parse(DoctorCommand, "doctor", arguments)
    site = find_site(command.where.site, os.environ, names_of_this_machine())
    if command.nccl_log:
        return _examine_log(command.nccl_log, site)
    if not command.where.names_hosts:
        return _print_json(site) if command.json else _examine_this_machine(site)
    if command.json:
        raise ConfigError("--json describes this machine; run it on each host, without -H, --hostfile and --launcher")
    return _examine_hosts(command.where, site)


def _examine_hosts(where: LaunchOptions, site: Site | None) -> int:
    from lockstep.launch.hosts_doctor import examine_hosts, plan_probe, show

    plan = plan_probe(where)
    if where.dry_run:
        from lockstep.launch.plan.job_plan import describe_plan

        print(describe_plan(plan))
        return 0
    report = examine_hosts(plan)
    if isinstance(report, int):
        return report
    return 1 if show(report, site) else 0


def _examine_log(path: Path, site: Site | None) -> int:
    from lockstep.launch.nccl_log import read_nccl_log

    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = read_nccl_log(file, site.plugin if site else (), site.interfaces if site else ())
    except OSError as error:
        raise ConfigError(f"--nccl-log {path}: cannot be read: {error.strerror}") from None
    print(printable(f"{found.describe()}; site {site.name if site else 'none'}"))
    for fault in found.faults:
        print(printable(f"problem: {fault}"))
    if not found.faults:
        print("No problems found.")
    return 1 if found.faults else 0


def _print_json(site: Site | None) -> int:
    from lockstep.launch.machine_doctor import examine
    from lockstep.world.machine import describe_machine

    checks = examine(site)
    print(json.dumps({**describe_machine(workers=1), "checks": [asdict(check) for check in checks]}, indent=2))
    return 1 if any(check.fix for check in checks) else 0


def _examine_this_machine(site: Site | None) -> int:
    from rich.console import Console
    from rich.table import Table

    from lockstep.launch.machine_doctor import examine

    table = Table("check", "found", "", show_edge=False)
    findings = examine(site)
    for finding in findings:
        table.add_row(finding.subject, finding.found, "[red]fix[/]" if finding.fix else "ok")
    console = Console()
    console.print(table)
    troubles = [finding for finding in findings if finding.fix]
    for finding in troubles:
        console.print(f"{finding.subject}: {finding.fix}", highlight=False, markup=False, soft_wrap=True)
    if not troubles:
        console.print("No problems found.")
    return 1 if troubles else 0
