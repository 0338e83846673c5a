"""Actors that come and go with the cluster's nodes, in an elastic job of Horovod."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from lockstep.errors import first_line
from lockstep.integrations.ray.actor import BaseHorovodWorker
from lockstep.integrations.ray.log import Reports
from lockstep.launch.controller.discovery import Discovery
from lockstep.launch.controller.elastic_driver import POLL_SECONDS, Driver, HostSlot, JobFailedError
from lockstep.launch.controller.run_function import PROCESS_FAILED
from lockstep.launch.plan.elastic_rules import ElasticRules
from lockstep.launch.plan.hosts import Host, slots_of


class HostDiscovery(Protocol):
    """Says which hosts there are, as Horovod's class of this name."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Hosts and how many workers each takes."""


class RayHostDiscovery:
    """The living nodes of the Ray cluster, all of whose CPUs (and GPUs) are taken to be the job's.

    Args:
        cpus_per_slot: CPUs of a worker.
        gpus_per_slot: Its GPUs, if `use_gpu`.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The nodes' addresses, and how many workers each takes."""
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
    """An actor in which a worker's function runs.

    Args:
        calls: References to the calls that prepare the actor, and last to that of the function.
        errors: The error of the first call that fails is added to them.
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
            except Exception as error:  # the function's own, or that the actor has died
                self._errors.append(error)
                cause = error.cause if isinstance(error, RayTaskError) else error
                self._how = f"failed with {type(cause).__name__}: {first_line(cause)}"
        return self._how

    def end(self, number: signal.Signals) -> None:
        ray.kill(self._actor)

    def take_rank(self, rank: int) -> None:
        """Nothing is shown by rank: Ray shows what its actors print."""


@dataclass
class ElasticActors:
    """Starts a function in as many actors as the cluster has room for, and goes on when that changes.

    Args:
        rules: How many there may be.
        discovery: Says where.
        gpus: Of each worker.
    """

    rules: ElasticRules
    discovery: HostDiscovery
    cpus: float
    gpus: float
    environment: Mapping[str, Any] = field(default_factory=dict)
    executable: tuple[Any, ...] = (None, None, None)
    _started: bool = False

    def start(self) -> None:
        """Wait until there are slots enough to begin with.

        Raises:
            TimeoutError: There were not, in time.
        """
        with self._discovery() as discovered:
            deadline = time.monotonic() + self.rules.timeout_seconds
            while (slots := slots_of(discovered.hosts)) < self.rules.initial:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{slots} slots within {self.rules.timeout_seconds:g} s (elastic_timeout), but the job needs "
                        f"{self.rules.initial} workers of {self.cpus:g} CPUs and {self.gpus:g} GPUs to begin with"
                    )
                time.sleep(POLL_SECONDS)
        self._started = True

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] = ()) -> list[Any]:
        """Call a function, which `hvd.elastic.run` makes elastic, with each worker's executable.

        Returns:
            The results of the workers that have finished, by rank.

        Raises:
            RuntimeError: The job cannot go on; it begins with Horovod's sentence and says which worker has failed, how.
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
                    reports.hand_on()
                    time.sleep(POLL_SECONDS)
            except JobFailedError as error:
                raise RuntimeError(f"{PROCESS_FAILED} {error}") from (errors[-1] if errors else None)
            finally:
                driver.end()
            finished = sorted(driver.finished, key=lambda worker: worker.rank or 0)
            return [worker.running.result for worker in finished if isinstance(worker.running, ActorWorker)]

    def shutdown(self) -> None:
        """Require another `start`; the actors have ended with the call."""
        self._started = False

    @contextmanager
    def _discovery(self) -> Iterator[Discovery]:
        """Ask for hosts while a `with` block runs."""
        discovered = Discovery(
            lambda: [Host(*each) for each in self.discovery.find_available_hosts_and_slots().items()]
        )
        try:
            yield discovered
        finally:
            discovered.stop()
