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
        variables |= interface_variables(interfaces)
        if here := [device for own in devices[first : first + slots[node]] for device in own]:
            variables[VISIBLE] = ",".join(here)
        result.append(variables)
    return result


def interface_variables(interfaces: Collection[str]) -> dict[str, str]:
    """Return the variables that restrict Gloo and NCCL to these network interfaces; empty for any."""
    names = ",".join(sorted(interfaces))
    return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names} if names else {}


def gpu_variables(own: Sequence[str], local_rank: int, workers: int) -> dict[str, str]:
    """Return the variables that make all GPUs of the host visible, with the worker's first one at index `local_rank`.

    Args:
        own: The indices or UUIDs of the worker's GPUs. If it is empty or contains a UUID, nothing is set, since UUIDs
            and indices cannot be mixed.
        workers: The number of workers on the host.
    """
    if not own or not all(device.isdecimal() for device in own):
        return {}
    others = [str(number) for number in range(workers * len(own)) if str(number) not in own]
    return {VISIBLE: ",".join([*others[:local_rank], *own, *others[local_rank:]])}
