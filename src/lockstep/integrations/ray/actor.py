"""The actor that is a worker of Horovod."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from lockstep.integrations.ray.log import configure
from lockstep.integrations.seats import gpu_variables
from lockstep.world.store import serve_store


class BaseHorovodWorker:
    """One worker's process. Functions are called in it; `horovod.torch.init` connects it to the others.

    Args:
        world_rank: Its rank, and `world_size` the number of workers, as far as they are known when it starts.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self._store: Any = None
        self.update_env_vars({"HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size})

    def node_id(self) -> str:
        """The Ray node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def node_address(self) -> str:
        """That node's address, at which the other nodes reach it."""
        return str(ray.util.get_node_ip_address())

    def hostname(self) -> str:
        """The machine's name."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs that Ray has given this actor."""
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set environment variables of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def see_gpus(self, local_rank: int, workers: int) -> None:
        """Show this process its node's GPUs, with the first of those that Ray has given it in its local rank's place.

        Args:
            workers: How many the node takes.
        """
        own = [str(device) for device in ray.get_gpu_ids()]
        self.update_env_vars(gpu_variables(own, local_rank, workers))

    def env_vars(self) -> dict[str, str]:
        """The environment of this process."""
        return dict(os.environ)

    def serve_store(self, address: str) -> int:
        """Serve the store in which the workers meet, as long as this process lives; the port."""
        self._store, port = serve_store(address)
        return port

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that `execute` hands to functions."""
        if executable_cls:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with this worker's executable, which is None where there is none."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Where `horovod.ray.ray_logger.log` sends what it is given."""
        configure(queue)
