"""What the workers of a job whose processes another program has placed are told of their places."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from lockstep.launch.plan.job_plan import horovod_variables, torchrun_variables

VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN = "LOCKSTEP_TASK_GPUS"


def worker_variables(
    hosts: Sequence[str], devices: Sequence[Sequence[str]], address: str, port: int, interfaces: Collection[str] = ()
) -> list[dict[str, str]]:
    """Each worker's environment variables, by rank.

    Args:
        hosts: The workers' hosts by rank; those of one host follow each other.
        devices: The GPUs of each worker, none where all see all.
        address: Where the job's store is, as `port`.
        interfaces: The only ones to use between hosts, if any.
    """
    names = list(dict.fromkeys(hosts))
    slots = [hosts.count(name) for name in names]
    told = []
    for rank, host in enumerate(hosts):
        node = names.index(host)
        first = sum(slots[:node])
        place = torchrun_variables(node, rank - first, slots, address, port)
        variables = {**place, **horovod_variables(place, slots), "HOROVOD_HOSTNAME": host}
        variables |= interface_variables(interfaces)
        if here := [device for own in devices[first : first + slots[node]] for device in own]:
            variables[VISIBLE] = ",".join(here)
        told.append(variables)
    return told


def interface_variables(interfaces: Collection[str]) -> dict[str, str]:
    """Those by which gloo and NCCL use these network interfaces alone; none where any will do."""
    names = ",".join(sorted(interfaces))
    return {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names} if names else {}


def gpu_variables(own: Sequence[str], local_rank: int, workers: int) -> dict[str, str]:
    """What shows a worker its host's GPUs, with the first of its own in its local rank's place.

    Args:
        own: Numbers or names of the worker's own; nothing is changed where there are none, or where a name is among
            them, which cannot stand beside numbers.
        workers: How many workers the host takes.
    """
    if not own or not all(device.isdecimal() for device in own):
        return {}
    others = [str(number) for number in range(workers * len(own)) if str(number) not in own]
    return {VISIBLE: ",".join([*others[:local_rank], *own, *others[local_rank:]])}


def own_gpu_variables(own: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """What tells a worker which GPUs are its own, by their places among those that `variables` show it."""
    seen = variables.get(VISIBLE, "").split(",")
    return {OWN: ",".join(str(seen.index(device)) if device in seen else device for device in own)}


def own_gpus() -> list[str]:
    """The GPUs of this worker's own, as numbers that torch takes; none where its task has none or it is in no task."""
    return [device for device in os.environ.get(OWN, "").split(",") if device]
