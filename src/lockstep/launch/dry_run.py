"""A plan, as text: what would be executed, on which host, with which variables."""

from __future__ import annotations

import shlex

from lockstep.launch.plan import LOOPBACK_INTERFACE, JobPlan, horovod_variables
from lockstep.store import LOOPBACK

AT_START = "<chosen at the start>"
OF_A_WORKER = (
    *("RANK", "LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)


def describe(plan: JobPlan) -> str:
    """Each node's start, the variables of its workers, and each worker's own with the command, in shell syntax."""
    lines = [f"# {note}" for note in plan.notes]
    for index, node in enumerate(plan.nodes):
        number, nodes = (plan.by_hand.node, plan.by_hand.nodes) if plan.by_hand else (index, len(plan.nodes))
        workers = [_variables(plan, index, local_rank) for local_rank in range(node.workers)]
        common = {name: value for name, value in workers[0].items() if name not in OF_A_WORKER}
        lines += ["", f"# node {number} of {nodes}: {node.host}", shlex.join(node.start)]
        lines += [f"  export {name}={_quoted(value)}" for name, value in common.items()]
        for variables in workers:
            own = " ".join(f"{name}={_quoted(variables[name])}" for name in OF_A_WORKER)
            lines.append(f"  {own} {shlex.join(plan.command)}")
    return "\n".join(lines)


def _quoted(value: str) -> str:
    return value if value.startswith("<") else shlex.quote(value)


def _variables(plan: JobPlan, index: int, local_rank: int) -> dict[str, str]:
    node, hand = plan.nodes[index], plan.by_hand
    if hand:
        rank, size, place = f"<after the {hand.node} nodes before>", "<of all nodes>", (hand.node, hand.nodes)
        address, port = hand.address, str(hand.port)
    else:
        rank, size = str(plan.first_rank(index) + local_rank), str(plan.workers)
        place = (index, len(plan.nodes))
        address, port = LOOPBACK if plan.is_local else AT_START, AT_START
    torchrun = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.workers),
        "GROUP_RANK": str(place[0]),
        "GROUP_WORLD_SIZE": str(place[1]),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    slots = [] if hand else [each.workers for each in plan.nodes]
    interface = LOOPBACK_INTERFACE if plan.is_local else "<the one that leads to the first host>"
    own = {"HOROVOD_HOSTNAME": node.host, "HOROVOD_GLOO_IFACE": interface, "GLOO_SOCKET_IFNAME": interface}
    nccl = f"={','.join(plan.interfaces)}" if plan.interfaces else "<that, if there is no other>"
    own["NCCL_SOCKET_IFNAME"] = nccl
    if "OMP_NUM_THREADS" not in plan.own_environment:
        own["OMP_NUM_THREADS"] = f"<cores of {node.host} / {node.workers}>"
    return {**torchrun, **horovod_variables(torchrun, slots), **own, **plan.environment}
