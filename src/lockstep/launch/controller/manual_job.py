"""A job whose nodes are started manually: the first one launches it on all, and the others relay."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from lockstep.errors import INTERRUPTED, ConfigError, LockstepError
from lockstep.files.output import say
from lockstep.launch.controller.manual_nodes import ManualNodes
from lockstep.launch.controller.relay import Relay
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.node.hardware import count_gpus
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan, ManualNode
from lockstep.launch.plan.options import JoinedNodes, LaunchOptions, plan_from
from lockstep.launch.plan.worker_variables import SECRET
from lockstep.launch.protocol.reachability import listen
from lockstep.world.devices import usable_cores
from lockstep.world.interfaces import addresses, is_loopback, only_address


def run_manual_job(plan: JobPlan, where: LaunchOptions, run: Callable[[LaunchOptions], int]) -> int:
    """Take this node's part of a job, and return the job's exit code.

    Args:
        plan: This node's part as it would be on its own.
        where: The options that `plan` was derived from.
        run: Called on the first node, once all have joined, with options that name them; runs the job.

    Raises:
        StartError: The nodes do not find each other.
    """
    manual = plan.manual
    assert manual
    for note in plan.notes:
        say(note, sys.stdout)
    if plan.obeys and not os.environ.get(SECRET):
        what = "--stage" if plan.staging else "a study"
        why = "all nodes run the first one's command"
        raise ConfigError(f"{what} with --nodes: {why}; set {SECRET} to the same text on all nodes")
    secret, address = os.environ.get(SECRET, ""), _resolved(manual.address)
    own = [each for _, each in addresses(plan.interfaces)] if plan.interfaces else []
    if manual.node:
        source = own[0] if own and not address.startswith("127.") else ""
        return asyncio.run(Relay(plan, manual, address, source, secret).run())
    listener, served = _listen(manual, address, plan.interfaces)
    nodes = ManualNodes(listener, manual.nodes, secret, names_of_this_machine(), plan.timings, plan.obeys)
    code = 1
    try:
        others = asyncio.run(nodes.wait(plan.start_timeout, f"{manual.address}:{manual.port}"))
        hosts = [(socket.gethostname(), plan.workers), *others]
        code = run(_joined(where, hosts, served, nodes))
    except LockstepError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        nodes.close(code)
    return code


def run_study(where: LaunchOptions, workers: int, study: Callable[[LaunchOptions], int]) -> int:
    """Run a study, with options that name all nodes if these are started manually; the others run its jobs.

    Args:
        workers: The largest number of workers in the study, which nodes without GPUs share.
    """
    if not where.is_manual or where.dry_run:
        return study(where)
    share = -(-workers // (where.nodes or where.world_size or 1))
    command = (where.python_of_workers, "-m", "lockstep")
    here = names_of_this_machine()
    plan = plan_from(where, None, command, os.environ, usable_cores(), lambda: count_gpus() or share, here)
    return run_manual_job(replace(plan, command=()), where, study)


def _joined(where: LaunchOptions, hosts: Sequence[tuple[str, int]], address: str, others: ManualNodes) -> JoinedNodes:
    """Return the options of a job whose nodes have joined, given their names and workers."""
    own = {each.name: getattr(where, each.name) for each in fields(where)}
    own |= dict.fromkeys(("nodes", "node_rank", "master_port", "dist_url", "world_size", "rank"))
    named = ",".join(f"{name}:{workers}" for name, workers in hosts)
    return JoinedNodes(**own | {"hosts": named, "master_addr": address}, others=others)


def _listen(manual: ManualNode, address: str, interfaces: Sequence[str]) -> tuple[socket.socket, str]:
    """Return the first node's listener, and the only address at which the workers may connect; "" for any."""
    served = address
    if address.startswith("127.") and not is_loopback(manual.address):
        # In Debian's /etc/hosts, the host's own name is 127.0.1.1; other hosts resolve it to another address.
        found, served = addresses(interfaces), ""
        if not found:
            why = f"{manual.address} is {address}, this host's only address; use an address in --master-addr"
            raise StartError(why)
        address = found[0][1] if interfaces else only_address(found)
    try:
        return listen(address, manual.port), served
    except OSError as error:
        flag = "--master-port" if "in use" in str(error) else "--master-addr"
        why = os.strerror(error.errno or 0)
        raise StartError(f"cannot listen at {address}:{manual.port}: {why}; change {flag}") from None


def _resolved(name: str) -> str:
    """Return the address of a host name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartError(f"cannot find {name}: {error.strerror}; check --master-addr") from None
    return str(found[0][4][0])
