"""A fixed number of actors that live until `shutdown`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.integrations.ray.actor import BaseHorovodWorker
from lockstep.integrations.ray.log import Reports
from lockstep.integrations.seats import worker_variables
from lockstep.world.store import LOOPBACK

POLL_SECONDS = 0.1
OTHERS_SECONDS = 10.0  # from a worker's failure until the others, which may be waiting for it, are killed


@dataclass
class FixedActors:
    """One actor per worker, ranked node by node.

    Args:
        bundles: The number of bundles in the placement group.
        per_bundle: The number of workers in each bundle.
        spread: Whether each bundle must be on a different node.
        resources: CPUs and GPUs of each worker.
        in_current_group: Start the workers in this program's placement group, if it has one.
        timeout_seconds: The time within which all workers must call `hvd.init()`.
        room_seconds: The time within which the cluster must provide the resources.
        interfaces: The network interfaces to use between nodes; empty for any.
    """

    bundles: int
    per_bundle: int
    spread: bool
    resources: Mapping[str, float]
    in_current_group: bool
    timeout_seconds: float
    room_seconds: float
    interfaces: Sequence[str]
    environment: Mapping[str, Any] = field(default_factory=dict)
    executable: tuple[Any, ...] = (None, None, None)
    workers: list[Any] = field(default_factory=list)
    own_group: PlacementGroup | None = None

    def start(self) -> None:
        """Start the workers and wait for them.

        Raises:
            TimeoutError: The cluster did not provide the resources in time.
        """
        if self.workers:
            raise RuntimeError("this RayExecutor is already started; call shutdown() first")
        try:
            actors = self._create()
            self._assign_ranks(actors)
            ray.get([worker.start_executable.remote(*self.executable) for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    @property
    def _size(self) -> int:
        return self.bundles * self.per_bundle

    def _create(self) -> list[Any]:
        """Create the actors, in the current placement group or in a new one."""
        group = get_current_placement_group() if self.in_current_group else None
        if group is None:
            bundle = {name: number * self.per_bundle for name, number in self.resources.items()}
            group = ray.util.placement_group(
                [bundle] * self.bundles, strategy="STRICT_SPREAD" if self.spread else "PACK"
            )
            self.own_group = group
            seconds = self.room_seconds
            if not ray.wait([group.ready()], timeout=seconds)[0]:
                where = " on different nodes" if self.spread else ""
                raise TimeoutError(
                    f"Ray did not provide resources for {self._size} workers within {seconds} s: they need "
                    f"{self.bundles} times {bundle}{where}, and the cluster has {ray.cluster_resources()}"
                )
        kind = ray.remote(BaseHorovodWorker)
        self.workers = [
            kind.options(
                num_cpus=self.resources["CPU"],
                num_gpus=self.resources.get("GPU", 0),
                # Tasks that a worker starts must run outside the group, whose resources the workers use up.
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group,
                    index // self.per_bundle if self.own_group else -1,
                    placement_group_capture_child_tasks=False,
                ),
            ).remote(index, self._size)
            for index in range(self._size)
        ]
        return self.workers

    def _assign_ranks(self, actors: Sequence[Any]) -> None:
        """Rank the workers node by node, and set their environment variables."""
        calls = [actor.node_id.remote() for actor in actors]
        if self.own_group is None and ray.wait(calls, num_returns=len(calls), timeout=self.room_seconds)[1]:
            raise TimeoutError(
                f"{self._size} workers of {dict(self.resources)} did not start within {self.room_seconds} s in the "
                "placement group of this program; add bundles to it, or set use_current_placement_group=False"
            )
        ids = ray.get(calls)
        nodes = list(dict.fromkeys(ids))
        self.workers = [actor for node in nodes for actor, own in zip(actors, ids, strict=True) if own == node]
        slots = [ids.count(node) for node in nodes]
        addresses = ray.get([actor.node_address.remote() for actor in self.workers])
        address = LOOPBACK if len(nodes) == 1 else addresses[0]
        port = ray.get(self.workers[0].serve_store.remote(address))
        devices = ray.get([actor.get_gpu_ids.remote() for actor in self.workers])
        hosts = [node for node, number in zip(nodes, slots, strict=True) for _ in range(number)]
        names = [[str(each) for each in own] for own in devices]
        environments = worker_variables(hosts, names, address, port, self.interfaces)
        timeout = {"HOROVOD_START_TIMEOUT": str(self.timeout_seconds)}
        ray.get(
            [
                worker.update_env_vars.remote({**variables, **timeout, **self.environment})
                for worker, variables in zip(self.workers, environments, strict=True)
            ]
        )

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] = ()) -> list[Any]:
        """Call a function with each worker's executable; return the results by rank."""
        self._check_started()
        with Reports(callbacks) as reports:
            if reports.queue is not None:
                ray.get([worker.set_queue.remote(reports.queue) for worker in self.workers])
            try:
                return self._results(self.execute_remote(fn), reports)
            finally:
                if reports.queue is not None:
                    for worker in self.workers:
                        worker.set_queue.remote(None)

    def execute_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Start a call like `execute`; return Ray's references to the results, by rank."""
        self._check_started()
        return [worker.execute.remote(fn) for worker in self.workers]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with rank 0's executable, and return its result."""
        self._check_started()
        return ray.get(self.workers[0].execute.remote(fn))

    def shutdown(self) -> None:
        """Stop the workers and release their resources."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self.own_group is not None:
            ray.util.remove_placement_group(self.own_group)
            self.own_group = None

    def _check_started(self) -> None:
        if not self.workers:
            raise RuntimeError("this RayExecutor has no workers; call start() first")

    def _results(self, references: Sequence[Any], reports: Reports) -> list[Any]:
        pending = list(references)
        while pending:
            done, pending = ray.wait(pending, timeout=POLL_SECONDS if reports.queue else None)
            try:
                ray.get(done)
            except Exception:
                if pending and ray.wait(pending, num_returns=len(pending), timeout=OTHERS_SECONDS)[1]:
                    self.shutdown()
                raise
            finally:
                reports.deliver()
        return list(ray.get(list(references)))
