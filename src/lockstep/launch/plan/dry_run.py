"""Print a plan: the commands, hosts and variables of a job."""

from __future__ import annotations

import shlex

from lockstep.launch.forking.python_command import NotForkedError, python_command
from lockstep.launch.plan.job_plan import LOOPBACK_INTERFACE, JobPlan, handed_on, horovod_variables, torchrun_variables
from lockstep.world.store import LOOPBACK

AT_START = "<chosen at the start>"
OF_A_WORKER = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)


def describe(plan: JobPlan) -> str:
    """Return, in shell syntax, each node's start command, its workers' variables, and each worker's command."""
    lines = [f"# {note}" for note in (*plan.notes, _how_workers_start(plan))]
    for index, node in enumerate(plan.nodes):
        number, nodes = (plan.manual.node, plan.manual.nodes) if plan.manual else (index, len(plan.nodes))
        workers = [_variables(plan, index, local_rank) for local_rank in range(node.workers)]
        common = {name: value for name, value in workers[0].items() if name not in OF_A_WORKER}
        lines += ["", f"# node {number} of {nodes}: {node.host}", shlex.join(node.start)]
        lines += [f"  export {name}={_quoted(value)}" for name, value in common.items()]
        for variables in workers:
            own = " ".join(f"{name}={_quoted(variables[name])}" for name in OF_A_WORKER)
            lines.append(f"  {own} {shlex.join(plan.command)}")
    return "\n".join(lines)


def _how_workers_start(plan: JobPlan) -> str:
    """Describe how workers start on this host; other hosts decide by their own environment."""
    try:
        program = python_command(plan.command, {**handed_on(plan.own_environment), **plan.environment})
    except NotForkedError as error:
        return f"each worker starts its own interpreter: {error}"
    return f"a host's workers are forked from one process that has imported {', '.join(program.modules)}"


def _quoted(value: str) -> str:
    return value if value.startswith("<") else shlex.quote(value)


def _variables(plan: JobPlan, index: int, local_rank: int) -> dict[str, str]:
    node, hand = plan.nodes[index], plan.manual
    if hand:
        slots = [node.workers] * hand.nodes  # an assumption
        torchrun = torchrun_variables(hand.node, local_rank, slots, hand.address, hand.port)
        torchrun |= dict.fromkeys(("RANK", "ROLE_RANK"), f"<after the {hand.node} nodes before>")
        torchrun |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), "<of all nodes>")
    else:
        slots = [each.workers for each in plan.nodes]
        address = LOOPBACK if plan.is_local else AT_START
        torchrun = torchrun_variables(index, local_rank, slots, address, AT_START)
    interface = LOOPBACK_INTERFACE if plan.is_local else "<towards the first host>"
    own = {"HOROVOD_HOSTNAME": node.host, "HOROVOD_GLOO_IFACE": interface, "GLOO_SOCKET_IFNAME": interface}
    nccl = f"={','.join(plan.interfaces)}" if plan.interfaces else "<that interface, if it is the only one>"
    own["NCCL_SOCKET_IFNAME"] = nccl
    if "OMP_NUM_THREADS" not in plan.own_environment:
        own["OMP_NUM_THREADS"] = f"<cores of {node.host} / {node.workers}>"
    return {**torchrun, **horovod_variables(torchrun, slots), **own, **plan.environment}
