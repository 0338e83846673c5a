"""Elastic jobs on Ray, whose actors follow the cluster's nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import RayTaskError

from horovod.ray.ray_logger import Reports
from horovod.ray.worker import BaseHorovodWorker
from horovod.runner.elastic.discovery import HostDiscovery
from lockstep.errors import first_line
from lockstep.launch.controller.discovery import Discovery
from lockstep.launch.controller.elastic_driver import POLL_SECONDS, Driver, HostSlot, JobFailedError
from lockstep.launch.controller.run_function import PROCESS_FAILED
from lockstep.launch.plan.hosts import Host, slots_of
from lockstep.launch.plan.options import ElasticRules


class RayHostDiscovery(HostDiscovery):
    """Discovers the live nodes of the Ray cluster. Assumes that the job may use all their CPUs (and GPUs).

    Args:
        use_gpu: Whether workers use GPUs.
        cpus_per_slot: CPUs per worker.
        gpus_per_slot: GPUs per worker, with `use_gpu`.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each node, by address."""
        hosts: dict[str, int] = {}
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            slots = resources.get("CPU", 0) // self.cpus_per_slot
            if self.use_gpu:
                slots = min(slots, resources.get("GPU", 0) // self.gpus_per_slot)
            if slots:
                hosts[node["NodeManagerAddress"]] = int(slots)
        return hosts


class ActorWorker:
    """An actor that runs a worker's function.

    Args:
        calls: References to the calls that prepare the actor and, as the last one, to the call of the function.
        errors: A list to which the error of the first failed call is appended.
    """

    result: Any = None

    def __init__(self, actor: Any, calls: Sequence[Any], errors: list[Exception]) -> None:
        self._actor = actor
        self._pending = list(calls)
        self._errors = errors
        self._how: str | None = None

    def poll(self) -> str | None:
        while self._how is None and ray.wait(self._pending[:1], timeout=0)[0]:
            try:
                self.result = ray.get(self._pending.pop(0))
                self._how = None if self._pending else ""
            except Exception as error:  # raised by the function, or because the actor died
                self._errors.append(error)
                cause = error.cause if isinstance(error, RayTaskError) else error
                self._how = f"failed with {type(cause).__name__}: {first_line(cause)}"
        return self._how

    def end(self, number: signal.Signals) -> None:
        ray.kill(self._actor)

    def take_rank(self, rank: int) -> None:
        """Do nothing: Ray prints the output of its actors."""


@dataclass
class ElasticActors:
    """Runs a function in as many actors as the cluster has resources for, and adapts when that changes.

    Args:
        rules: The limits on the number of workers and restarts.
        discovery: Returns the hosts and their slots.
        cpus: CPUs per worker.
        gpus: GPUs per worker.
        environment: Environment variables for the workers.
        executable: The arguments of `BaseHorovodWorker.start_executable`.
    """

    rules: ElasticRules
    discovery: HostDiscovery
    cpus: float
    gpus: float
    environment: Mapping[str, Any] = field(default_factory=dict)
    executable: tuple[Any, ...] = (None, None, None)
    _started: bool = False

    def start(self) -> None:
        """Wait until there are enough slots to start the job.

        Raises:
            TimeoutError: There were not enough slots within `elastic_timeout`.
        """
        with self._discovery() as discovered:
            deadline = time.monotonic() + self.rules.timeout_seconds
            while (slots := slots_of(discovered.hosts)) < self.rules.initial:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"found {slots} slots within {self.rules.timeout_seconds:g} s (elastic_timeout), but the job "
                        f"needs {self.rules.initial} workers, each with {self.cpus:g} CPUs and {self.gpus:g} GPUs"
                    )
                time.sleep(POLL_SECONDS)
        self._started = True

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] = ()) -> list[Any]:
        """Call a function decorated with `hvd.elastic.run` in each worker, with its executable.

        Returns:
            The results of the workers that finished, by rank.

        Raises:
            RuntimeError: The job cannot continue. The message starts with Horovod's text and names the failed worker.
        """
        if not self._started:
            raise RuntimeError("this executor has not been started; call start() first")
        kind = ray.remote(BaseHorovodWorker)
        errors: list[Exception] = []
        with self._discovery() as discovered, Reports(callbacks) as reports:

            def start(slot: HostSlot, variables: Mapping[str, str]) -> ActorWorker:
                actor: Any = kind.options(
                    num_cpus=self.cpus, num_gpus=self.gpus, resources={f"node:{slot.host}": 0.001}
                ).remote()
                calls = [actor.update_env_vars.remote({**variables, **self.environment})]
                if self.gpus:
                    here = next((host.slots for host in discovered.hosts if host.name == slot.host), 0)
                    calls.append(actor.see_gpus.remote(slot.number, here))
                calls.append(actor.set_queue.remote(reports.queue))
                calls.append(actor.start_executable.remote(*self.executable))
                return ActorWorker(actor, [*calls, actor.execute.remote(fn)], errors)

            driver = Driver(self.rules, lambda: discovered.hosts, start, ray.util.get_node_ip_address())
            try:
                while not driver.step():
                    reports.deliver()
                    time.sleep(POLL_SECONDS)
            except JobFailedError as error:
                raise RuntimeError(f"{PROCESS_FAILED} {error}") from (errors[-1] if errors else None)
            finally:
                driver.end()
            finished = sorted(driver.finished, key=lambda worker: worker.rank or 0)
            return [worker.running.result for worker in finished if isinstance(worker.running, ActorWorker)]

    def shutdown(self) -> None:
        """Require another `start` before `execute`; the actors have already exited."""
        self._started = False

    @contextmanager
    def _discovery(self) -> Iterator[Discovery]:
        """Discover hosts during a `with` block."""
        discovered = Discovery(
            lambda: [Host(*each) for each in self.discovery.find_available_hosts_and_slots().items()]
        )
        try:
            yield discovered
        finally:
            discovered.stop()


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
