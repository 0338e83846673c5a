"""Functions of Horovod on a Ray cluster, in actors that live until `shutdown`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.integrations.ray.actor import BaseHorovodWorker
from lockstep.launch.plan.job_plan import horovod_variables, torchrun_variables
from lockstep.world.store import LOOPBACK

POLL_SECONDS = 0.1
OTHERS_SECONDS = 10.0  # in which the others end after one worker's error, before they are killed: they may wait for it


@dataclass
class RaySettings:
    """How workers are started.

    Args:
        timeout_s: Seconds in which all workers must have called `hvd.init()`.
        placement_group_timeout_s: Seconds in which the cluster must have room for them.
        nics: The network interfaces to use between nodes; any where there are none.
        ssh_identity_file: Not used: Ray starts the workers.
    """

    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    nics: Sequence[str] | None = None
    ssh_identity_file: str | None = None


class RayExecutor:
    """Workers of Horovod in a Ray cluster.

    The number of workers is given by `num_workers`, wherever there is room, or by `num_hosts` of
    `num_workers_per_host`, on as many different nodes.

    Args:
        settings: By `create_settings`.
        cpus_per_worker: CPUs that Ray sets aside for each worker.
        use_gpu: Give each worker `gpus_per_worker` GPUs (1). All workers of a node see all of the node's, in the same
            order, so that `hvd.local_rank()` is the number of a worker's own.
        use_current_placement_group: Start the workers in the placement group that this program runs in, if it does.

    Raises:
        ValueError: The numbers contradict each other.
    """

    def __init__(
        self,
        settings: RaySettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
    ) -> None:
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("give RayExecutor either num_workers, or num_hosts with num_workers_per_host")
        if min(num for num in (num_workers, num_hosts, num_workers_per_host) if num is not None) < 1:
            raise ValueError("RayExecutor needs one worker at least")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True")
        self.settings = settings
        self.num_workers = num_workers or (num_hosts or 1) * num_workers_per_host
        self._per_bundle = num_workers_per_host if num_hosts else 1
        self._spread = num_hosts is not None
        self._resources = {"CPU": cpus_per_worker, **({"GPU": gpus_per_worker or 1} if use_gpu else {})}
        self._in_current_group = use_current_placement_group
        self._own_group: PlacementGroup | None = None
        self.workers: list[Any] = []

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Sequence[str] | None = None,
    ) -> RaySettings:
        """Settings for the constructor.

        Args:
            ssh_str: A private key, which is written to `ssh_identity_file` where that does not exist.
        """
        if ssh_str and ssh_identity_file and not Path(ssh_identity_file).exists():
            with open(os.open(ssh_identity_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(ssh_str)
        return RaySettings(timeout_s, placement_group_timeout_s, nics, ssh_identity_file)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers, and wait until they have started.

        Args:
            executable_cls: The class of the object that `execute` hands to functions; each worker makes one.
            extra_env_vars: Environment variables of the workers.

        Raises:
            TimeoutError: The cluster has no room for them.
        """
        if self.workers:
            raise RuntimeError("this RayExecutor has been started already; call shutdown() first")
        try:
            actors = self._create()
            self._introduce(actors, extra_env_vars or {})
            arguments = executable_cls, executable_args, executable_kwargs
            ray.get([worker.start_executable.remote(*arguments) for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def _create(self) -> list[Any]:
        """The actors, in the placement group that is there, or in one of their own."""
        group = get_current_placement_group() if self._in_current_group else None
        if group is None:
            count = self.num_workers // self._per_bundle
            bundle = {name: number * self._per_bundle for name, number in self._resources.items()}
            group = ray.util.placement_group([bundle] * count, strategy="STRICT_SPREAD" if self._spread else "PACK")
            self._own_group = group
            seconds = self.settings.placement_group_timeout_s
            if not ray.wait([group.ready()], timeout=seconds)[0]:
                where = " on different nodes" if self._spread else ""
                raise TimeoutError(
                    f"Ray has no room for {self.num_workers} workers within {seconds} s: they need {count} times "
                    f"{bundle}{where}, and the cluster has {ray.cluster_resources()}"
                )
        kind = ray.remote(BaseHorovodWorker)
        self.workers = [
            kind.options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, index // self._per_bundle if self._own_group else -1
                ),
            ).remote(index, self.num_workers)
            for index in range(self.num_workers)
        ]
        return self.workers

    def _introduce(self, actors: Sequence[Any], extra: Mapping[str, Any]) -> None:
        """Rank the workers, node by node, and tell them where they stand and where they meet."""
        ids = ray.get([actor.node_id.remote() for actor in actors])
        nodes = list(dict.fromkeys(ids))
        self.workers = [actor for node in nodes for actor, own in zip(actors, ids, strict=True) if own == node]
        slots = [ids.count(node) for node in nodes]
        addresses = ray.get([actor.node_address.remote() for actor in self.workers])
        address = LOOPBACK if len(nodes) == 1 else addresses[0]
        port = ray.get(self.workers[0].serve_store.remote(address))
        devices = ray.get([actor.get_gpu_ids.remote() for actor in self.workers])
        done = []
        for rank, worker in enumerate(self.workers):
            node = next(index for index in range(len(nodes)) if rank < sum(slots[: index + 1]))
            first = sum(slots[:node])
            place = torchrun_variables(node, rank - first, slots, address, port)
            variables = {**place, **horovod_variables(place, slots), "HOROVOD_HOSTNAME": nodes[node]}
            variables["HOROVOD_START_TIMEOUT"] = str(self.settings.timeout_s)
            if self.settings.nics:
                names = ",".join(sorted(self.settings.nics))
                variables |= {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}
            here = [str(device) for own in devices[first : first + slots[node]] for device in own]
            if here:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(here)
            done.append(worker.update_env_vars.remote({**variables, **extra}))
        ray.get(done)

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function with each worker's executable.

        Args:
            callbacks: Called, here, with each thing that a worker gives to `horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            Exception: That of the worker that failed first, as Ray raises it. Workers that do not end within 10 s
                after it, since they wait for the failed one, are killed, and the executor must be started again.
        """
        self._check_started()
        queue = self._listen() if callbacks else None
        try:
            return self._results([worker.execute.remote(fn) for worker in self.workers], queue, callbacks or ())
        finally:
            if queue is not None:
                for worker in self.workers:
                    worker.set_queue.remote(None)
                queue.shutdown()

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
        """Begin such a call, and return Ray's references to its results, by rank."""
        self._check_started()
        return [worker.execute.remote(_ignoring_executable(fn, args, kwargs)) for worker in self.workers]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with rank 0's executable, and return its result."""
        self._check_started()
        return ray.get(self.workers[0].execute.remote(fn))

    def shutdown(self) -> None:
        """End the workers, and give back what Ray had set aside for them."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self._own_group is not None:
            ray.util.remove_placement_group(self._own_group)
            self._own_group = None

    def _check_started(self) -> None:
        if not self.workers:
            raise RuntimeError("this RayExecutor has no workers; call start() first")

    def _listen(self) -> Queue:
        queue = Queue(actor_options={"num_cpus": 0})
        ray.get([worker.set_queue.remote(queue) for worker in self.workers])
        return queue

    def _results(
        self, references: Sequence[Any], queue: Queue | None, callbacks: Sequence[Callable[[Any], Any]]
    ) -> list[Any]:
        pending = list(references)
        while pending:
            done, pending = ray.wait(pending, timeout=POLL_SECONDS if queue else None)
            try:
                ray.get(done)
            except Exception:
                if pending and ray.wait(pending, num_returns=len(pending), timeout=OTHERS_SECONDS)[1]:
                    self.shutdown()
                raise
            finally:
                if queue is not None:
                    _hand_on(queue, callbacks)
        return list(ray.get(list(references)))


def _hand_on(queue: Queue, callbacks: Sequence[Callable[[Any], Any]]) -> None:
    with suppress(Empty):
        while True:
            report = queue.get_nowait()
            for callback in callbacks:
                callback(report)


def _ignoring_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    return lambda executable: fn(*(args or ()), **(kwargs or {}))
