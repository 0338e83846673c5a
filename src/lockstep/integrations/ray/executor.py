"""Run Horovod functions on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.integrations.ray.elastic_actors import ElasticActors, HostDiscovery, RayHostDiscovery
from lockstep.integrations.ray.fixed_actors import FixedActors
from lockstep.integrations.seats import interface_variables
from lockstep.launch.plan.elastic_rules import ElasticRules


@dataclass
class RaySettings:
    """Settings for starting workers.

    Args:
        timeout_s: Seconds within which all workers must call `hvd.init()`.
        placement_group_timeout_s: Seconds within which the cluster must provide the workers' resources.
        nics: The network interfaces to use between nodes; None for any.
        ssh_identity_file: Not used: Ray starts the workers.
        discovery: Returns the hosts of an elastic job; used with override_discovery=False.
        verbose: Not used.
    """

    timeout_s: int = 300
    placement_group_timeout_s: int = 100
    nics: Sequence[str] | None = None
    ssh_identity_file: str | None = None
    discovery: HostDiscovery | None = None
    verbose: int = 1


class RayExecutor:
    """Horovod workers on a Ray cluster.

    Give the number of workers in one of three ways: `num_workers`, on any nodes; `num_hosts` and
    `num_workers_per_host`, on that number of different nodes; or `min_workers` and `max_workers`, for functions
    decorated with `hvd.elastic.run`, on as many nodes as are available at each moment.

    Args:
        settings: From `create_settings`.
        cpus_per_worker: CPUs that Ray reserves for each worker.
        use_gpu: Whether to reserve `gpus_per_worker` GPUs (default 1) for each worker. Every worker sees all
            GPUs of its node; `hvd.local_rank()` is the index of the worker's GPU.
        use_current_placement_group: Start the workers in this program's placement group, if it has one.
        reset_limit: How many times an elastic job may restart with other workers; None for no limit.
        cooldown_range: The minimum and maximum number of seconds before a failed worker is replaced.
        elastic_timeout: Seconds to wait for enough workers.
        override_discovery: Use the live nodes of the cluster as hosts, instead of `settings.discovery`.

    Raises:
        ValueError: The arguments are inconsistent.
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
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if sum(number is not None for number in (num_workers, num_hosts, min_workers)) != 1:
            raise ValueError(
                "RayExecutor needs exactly one of num_workers, num_hosts (with num_workers_per_host) and min_workers"
            )
        counts = (num_workers, num_hosts, num_workers_per_host, min_workers)
        if min(number for number in counts if number is not None) < 1:
            raise ValueError("RayExecutor needs at least one worker")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker needs use_gpu=True")
        if max_workers is not None and max_workers < (min_workers or max_workers + 1):
            raise ValueError("max_workers needs min_workers, and must be at least min_workers")
        self.settings = settings
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        self._actors: FixedActors | ElasticActors
        if min_workers is None:
            self._actors = FixedActors(
                bundles=num_workers or num_hosts or 1,
                per_bundle=num_workers_per_host if num_hosts else 1,
                spread=num_hosts is not None,
                resources={"CPU": cpus_per_worker, **({"GPU": gpus} if gpus else {})},
                in_current_group=use_current_placement_group,
                timeout_seconds=settings.timeout_s,
                room_seconds=settings.placement_group_timeout_s,
                interfaces=settings.nics or (),
            )
        else:
            if override_discovery:
                settings.discovery = RayHostDiscovery(use_gpu, cpus_per_worker, gpus)
            rules = ElasticRules(
                initial=min_workers,
                minimum=min_workers,
                maximum=max_workers,
                timeout_seconds=elastic_timeout,
                reset_limit=reset_limit,
                cooldown_seconds=cooldown_range or (0.0, 0.0),
            )
            self._actors = _elastic_actors(settings, rules, cpus_per_worker, gpus)

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Sequence[str] | None = None,
    ) -> RaySettings:
        """Return settings for the constructor; see `RaySettings`.

        Args:
            ssh_str: A private key to write to `ssh_identity_file`, if that file does not exist.
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
        """Start the workers and wait for them. In an elastic job, each `run` starts new workers.

        Args:
            executable_cls: The class of the object that `execute` passes to functions; each worker creates one.
            extra_env_vars: Environment variables for the workers.

        Raises:
            TimeoutError: The cluster did not provide the resources in time.
        """
        self._actors.executable = executable_cls, executable_args, executable_kwargs
        self._actors.environment = {**self._actors.environment, **(extra_env_vars or {})}
        self._actors.start()

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function with each worker's executable.

        Args:
            callbacks: Called in this program with each object that a worker passes to `horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.

        Raises:
            Exception: The exception of the worker that failed first, as Ray raises it. If the other workers do not
                finish within 10 s, for example because they wait for it, all workers are killed; call `start` again.
            RuntimeError: An elastic job cannot continue.
        """
        return self._actors.execute(fn, callbacks or ())

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
        return self._fixed("run_remote").execute_remote(_ignoring_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with rank 0's executable, and return its result."""
        return self._fixed("execute_single").execute_single(fn)

    def shutdown(self) -> None:
        """Stop the workers and release their resources."""
        self._actors.shutdown()

    def _fixed(self, call: str) -> FixedActors:
        if isinstance(self._actors, ElasticActors):
            raise NotImplementedError(
                f"{call} is not supported with min_workers: elastic workers exit after each `run`"
            )
        return self._actors


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "ElasticRayExecutor is not supported; use RayExecutor(RayExecutor.create_settings(), min_workers=..., "
        "max_workers=...), and start(extra_env_vars=...) for env_vars"
    )


class ElasticRayExecutor:
    """Refused: Horovod deprecated it for `RayExecutor` with `min_workers`.

    Raises:
        NotImplementedError: Always; so does `create_settings`.
    """

    create_settings = staticmethod(_refuse)

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse()


def _elastic_actors(settings: RaySettings, rules: ElasticRules, cpus: float, gpus: float) -> ElasticActors:
    if settings.discovery is None:
        raise ValueError("override_discovery=False needs settings.discovery to return the hosts")
    variables: dict[str, Any] = {
        "HOROVOD_ELASTIC_TIMEOUT": rules.timeout_seconds,
        "HOROVOD_START_TIMEOUT": settings.timeout_s,
    }
    variables |= interface_variables(settings.nics or ())
    return ElasticActors(rules, settings.discovery, cpus, gpus, variables)


def _ignoring_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    return lambda executable: fn(*(args or ()), **(kwargs or {}))
