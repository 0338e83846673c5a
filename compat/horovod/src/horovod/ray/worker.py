"""The Ray actor of a Horovod worker, and the variables of workers that Ray has placed on hosts and GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from horovod.ray.ray_logger import configure
from lockstep.launch.plan.worker_variables import horovod_variables, of_horovodrun, torchrun_variables
from lockstep.world.rendezvous import serve_store

VISIBLE = "CUDA_VISIBLE_DEVICES"


class BaseHorovodWorker:
    """One worker's process. It runs functions; `horovod.torch.init` connects it to the other workers.

    Args:
        world_rank: The worker's rank, if known already.
        world_size: The number of workers, if known already.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self._store: Any = None
        self.update_env_vars({"HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size})

    def node_id(self) -> str:
        """Return the id of the actor's Ray node."""
        return str(ray.get_runtime_context().get_node_id())

    def node_address(self) -> str:
        """Return the node's address, as reachable from other nodes."""
        return str(ray.util.get_node_ip_address())

    def hostname(self) -> str:
        """Return the host name."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """Return the GPUs that Ray assigned to this actor."""
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return the environment variables of this process."""
        return dict(os.environ)

    def serve_store(self, address: str) -> int:
        """Serve the job's store until this process exits; return the port."""
        self._store, port = serve_store(address)
        return port

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the object that `execute` passes to functions."""
        if executable_cls:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with this worker's executable, or None."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Set the queue to which `horovod.ray.ray_logger.log` sends reports."""
        configure(queue)


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
        variables = of_horovodrun(horovod_variables(ranks, slots) | {"HOROVOD_HOSTNAME": host}, node)
        if interfaces:
            chosen = ",".join(sorted(interfaces))
            variables |= {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": chosen}
        if here := [device for own in devices[first : first + slots[node]] for device in own]:
            variables[VISIBLE] = ",".join(here)
        result.append(variables)
    return result
