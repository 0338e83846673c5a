"""Build the environment variables of workers that Ray has placed on hosts and GPUs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lockstep.launch.plan.worker_variables import horovod_variables, torchrun_variables

VISIBLE = "CUDA_VISIBLE_DEVICES"


def worker_variables(
    hosts: Sequence[str], devices: Sequence[Sequence[str]], address: str, port: int, interfaces: Collection[str] = ()
) -> list[dict[str, str]]:
    """Return each worker's environment variables, by rank.

    Args:
        hosts: The workers' hosts by rank; workers of one host have consecutive ranks.
        devices: The GPUs of each worker; empty to leave CUDA_VISIBLE_DEVICES unset.
        address: The address of the job's store.
        port: The port of the job's store.
        interfaces: The network interfaces to use between hosts; empty for any.
    """
    names = list(dict.fromkeys(hosts))
    slots = [hosts.count(name) for name in names]
    result = []
    for rank, host in enumerate(hosts):
        node = names.index(host)
        first = sum(slots[:node])
        ranks = torchrun_variables(node, rank - first, slots, address, port)
        variables = {**ranks, **horovod_variables(ranks, slots), "HOROVOD_HOSTNAME": host}
        if interfaces:
            chosen = ",".join(sorted(interfaces))
            variables |= {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": chosen}
        if here := [device for own in devices[first : first + slots[node]] for device in own]:
            variables[VISIBLE] = ",".join(here)
        result.append(variables)
    return result
