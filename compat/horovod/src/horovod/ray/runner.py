"""Run Horovod functions on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod.ray.elastic import refuse
from horovod.ray.ray_logger import Reports
from horovod.ray.worker import BaseHorovodWorker, worker_variables
from lockstep.launch.plan.job_plan import HOROVOD_VARIABLES
from lockstep.world.interfaces import LOOPBACK
from lockstep.world.rendezvous import serve_store

POLL_SECONDS = 0.1
OTHERS_SECONDS = 10.0  # from a worker's failure until the others, which may be waiting for it, are killed


@dataclass
class MiniSettings:
    """Settings for starting workers.

    Args:
        timeout_s: Seconds within which all workers must call `hvd.init()`.
        placement_group_timeout_s: Seconds within which the cluster must provide the workers' resources.
        nics: The network interfaces to use between nodes; None for any.
        ssh_identity_file: Not used: Ray starts the workers.
        verbose: Not used.
    """

    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    nics: Sequence[str] | None = None
    ssh_identity_file: str | None = None
    verbose: int = 1


class RayExecutor:
    """Horovod workers on a Ray cluster.

    Give the number of workers in one of two ways: `num_workers`, on any nodes; or `num_hosts` and
    `num_workers_per_host`, on that number of different nodes.

    Args:
        settings: From `create_settings`.
        cpus_per_worker: CPUs that Ray reserves for each worker.
        use_gpu: Whether to reserve `gpus_per_worker` GPUs (default 1) for each worker. Every worker sees all
            GPUs of its node; `hvd.local_rank()` is the index of the worker's GPU.
        use_current_placement_group: Start the workers in this program's placement group, if it has one.
        min_workers, max_workers: Refused: they make a job elastic.
        reset_limit, cooldown_range, elastic_timeout, override_discovery: No effect, as in Horovod without min_workers.

    Raises:
        ValueError: The arguments are inconsistent.
        NotImplementedError: `min_workers` or `max_workers` is set.
    """

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        for name, number in (("min_workers", min_workers), ("max_workers", max_workers)):
            if number is not None:
                refuse(f"RayExecutor({name}={number})")
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("RayExecutor needs either num_workers or num_hosts (with num_workers_per_host)")
        counts = (num_workers, num_hosts, num_workers_per_host)
        if min(number for number in counts if number is not None) < 1:
            raise ValueError("RayExecutor needs at least one worker")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True")
        self.settings = settings
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._bundles = num_workers or num_hosts or 1
        self._per_bundle = num_workers_per_host if num_hosts else 1
        self._spread = num_hosts is not None  # each bundle is on a different node
        self._resources = {"CPU": cpus_per_worker, **({"GPU": gpus} if gpus else {})}  # of each worker
        self._in_current_group = use_current_placement_group
        self._environment: dict[str, Any] = {}
        self._executable: tuple[Any, ...] = (None, None, None)
        self._workers: list[Any] = []  # an actor per worker, ranked node by node
        self._own_group: PlacementGroup | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Sequence[str] | None = None,
    ) -> MiniSettings:
        """Return settings for the constructor; see `MiniSettings`. `ssh_str` is not used."""
        return MiniSettings(timeout_s, placement_group_timeout_s, nics, ssh_identity_file)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers and wait for them.

        Args:
            executable_cls: The class of the object that `execute` passes to functions; each worker creates one.
            extra_env_vars: Environment variables for the workers.

        Raises:
            TimeoutError: The cluster did not provide the resources in time.
        """
        self._executable = executable_cls, executable_args, executable_kwargs
        self._environment |= extra_env_vars or {}
        if self._workers:
            raise RuntimeError("this RayExecutor is already started; call shutdown() first")
        try:
            self._create()
            self._assign_ranks()
            ray.get([worker.start_executable.remote(*self._executable) for worker in self._workers])
        except BaseException:
            self.shutdown()
            raise

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function with each worker's executable.

        Args:
            callbacks: Called in this program with each object that a worker passes to `horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            Exception: The exception of the worker that failed first, as Ray raises it. If the other workers do not
                finish within 10 s, for example because they wait for it, all workers are killed; call `start` again.
        """
        self._check_started()
        with Reports(callbacks or ()) as reports:
            if reports.queue is not None:
                ray.get([worker.set_queue.remote(reports.queue) for worker in self._workers])
            try:
                return self._results(self._execute_remote(fn), reports)
            finally:
                if reports.queue is not None:
                    for worker in self._workers:
                        worker.set_queue.remote(None)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` in each worker; see `execute`."""
        return self.execute(_ignoring_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Start a call like `run`; return Ray's references to the results, by rank."""
        return self._execute_remote(_ignoring_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with rank 0's executable, and return its result."""
        self._check_started()
        return ray.get(self._workers[0].execute.remote(fn))

    def shutdown(self) -> None:
        """Stop the workers and release their resources."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._own_group is not None:
            ray.util.remove_placement_group(self._own_group)
            self._own_group = None

    @property
    def _size(self) -> int:
        return self._bundles * self._per_bundle

    def _create(self) -> None:
        """Create the actors, in the current placement group or in a new one."""
        group = get_current_placement_group() if self._in_current_group else None
        if group is None:
            bundle = {name: number * self._per_bundle for name, number in self._resources.items()}
            group = ray.util.placement_group(
                [bundle] * self._bundles, strategy="STRICT_SPREAD" if self._spread else "PACK"
            )
            self._own_group = group
            seconds = self.settings.placement_group_timeout_s
            if not ray.wait([group.ready()], timeout=seconds)[0]:
                where = " on different nodes" if self._spread else ""
                raise TimeoutError(
                    f"Ray did not provide resources for {self._size} workers within {seconds} s: they need "
                    f"{self._bundles} times {bundle}{where}, and the cluster has {ray.cluster_resources()}"
                )
        kind = ray.remote(BaseHorovodWorker)
        self._workers = [
            kind.options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                # Tasks that a worker starts must run outside the group, whose resources the workers use up.
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group,
                    index // self._per_bundle if self._own_group else -1,
                    placement_group_capture_child_tasks=False,
                ),
            ).remote(index, self._size)
            for index in range(self._size)
        ]

    def _assign_ranks(self) -> None:
        """Rank the workers node by node, and set their environment variables."""
        calls, seconds = [worker.node_id.remote() for worker in self._workers], self.settings.placement_group_timeout_s
        if self._own_group is None and ray.wait(calls, num_returns=len(calls), timeout=seconds)[1]:
            raise TimeoutError(
                f"{self._size} workers of {dict(self._resources)} did not start within {seconds} s in the "
                "placement group of this program; add bundles to it, or set use_current_placement_group=False"
            )
        ids = ray.get(calls)
        nodes = list(dict.fromkeys(ids))
        placed = sorted(zip(ids, self._workers, strict=True), key=lambda pair: nodes.index(pair[0]))
        hosts, self._workers = [node for node, _ in placed], [worker for _, worker in placed]
        addresses = ray.get([actor.node_address.remote() for actor in self._workers])
        address = LOOPBACK if len(nodes) == 1 else addresses[0]
        port = ray.get(self._workers[0].serve_store.remote(address))
        devices = ray.get([actor.get_gpu_ids.remote() for actor in self._workers])
        names = [[str(each) for each in own] for own in devices]
        environments = worker_variables(hosts, names, address, port, self.settings.nics or ())
        timeout = {"HOROVOD_START_TIMEOUT": str(self.settings.timeout_s)}
        ray.get(
            [
                worker.update_env_vars.remote({**variables, **timeout, **self._environment})
                for worker, variables in zip(self._workers, environments, strict=True)
            ]
        )

    def _execute_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._check_started()
        return [worker.execute.remote(fn) for worker in self._workers]

    def _check_started(self) -> None:
        if not self._workers:
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


def _ignoring_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    return lambda executable: fn(*(args or ()), **(kwargs or {}))


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
