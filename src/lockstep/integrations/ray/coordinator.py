"""Places of workers that another program has started in Ray, and where they meet: for Ray's own HorovodTrainer."""

from __future__ import annotations

from typing import Any

import ray

from lockstep.launch.plan.job_plan import HOROVOD_VARIABLES
from lockstep.world.store import serve_store


class Coordinator:
    """Tells workers their places. Those of a node are registered one after the other, and rank 0 first.

    Args:
        settings: Not used.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.hostnames: set[str] = set()
        self.node_id_by_rank: dict[str, list[int]] = {}  # the other way round; the name is Horovod's
        self._store: Any = None

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return sum(map(len, self.node_id_by_rank.values()))

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Add a worker."""
        self.hostnames.add(hostname)
        self.node_id_by_rank.setdefault(node_id, []).append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """By rank, the environment variables of the worker's place."""
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
        """Serve the store in which the workers meet, as long as this object lives; the variables that lead there."""
        address = str(ray.util.get_node_ip_address())
        self._store, port = serve_store(address)
        where = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {**HOROVOD_VARIABLES, **where}
