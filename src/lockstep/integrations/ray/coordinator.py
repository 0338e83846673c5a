"""Rank info and rendezvous for workers that another program starts on Ray, such as Ray's HorovodTrainer."""

from __future__ import annotations

from typing import Any

import ray

from lockstep.launch.plan.job_plan import HOROVOD_VARIABLES
from lockstep.world.store import serve_store


class Coordinator:
    """Computes the workers' rank info. Register rank 0 first, and the workers of a node consecutively.

    Args:
        settings: Not used.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.hostnames: set[str] = set()
        self.node_id_by_rank: dict[str, list[int]] = {}  # maps a node id to ranks; the name is Horovod's
        self._store: Any = None

    @property
    def world_size(self) -> int:
        """The number of registered workers."""
        return sum(map(len, self.node_id_by_rank.values()))

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Add a worker."""
        self.hostnames.add(hostname)
        self.node_id_by_rank.setdefault(node_id, []).append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """Return the environment variables with each worker's rank info, by rank."""
        nodes = list(self.node_id_by_rank.values())
        return {
            rank: {
                "HOROVOD_CROSS_RANK": str(node),
                "HOROVOD_CROSS_SIZE": str(len(nodes)),
                "HOROVOD_LOCAL_RANK": str(local_rank),
                "HOROVOD_LOCAL_SIZE": str(len(ranks)),
            }
            for node, ranks in enumerate(nodes)
            for local_rank, rank in enumerate(ranks)
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """Serve the job's store while this object exists; return the environment variables for connecting to it."""
        address = str(ray.util.get_node_ip_address())
        self._store, port = serve_store(address)
        where = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {**HOROVOD_VARIABLES, **where}
