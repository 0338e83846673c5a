"""Elastic jobs on Ray, whose actors follow the cluster's nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, NoReturn

import ray
from ray.exceptions import RayTaskError

from horovod.ray.ray_logger import Reports
from horovod.ray.worker import BaseHorovodWorker
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.worker_environment import worker_variables
from lockstep.errors import first_line
from lockstep.launch.controller.discovery import Discovery
from lockstep.launch.controller.run_function import PROCESS_FAILED
from lockstep.launch.node.staying_workers import StayingWorkers
from lockstep.launch.plan.hosts import Host, slots_of
from lockstep.launch.plan.timings import Timings
from lockstep.world import NODE_PROCESS, RESTART_COUNT
from lockstep.world.generations import ADDED, REMOVED
from lockstep.world.launcher_environment import TORCHRUN_ID
from lockstep.world.rendezvous import serve_store

POLL_SECONDS = 0.05


class JobFailedError(Exception):
    """The job cannot continue; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class ElasticRules:
    """An elastic job continues with `minimum` to `maximum` workers (None: any number).

    Args:
        timeout_seconds: Limit for waiting for enough workers.
        reset_limit: How many times the job may form a new generation; None for no limit.
    """

    minimum: int
    maximum: int | None = None
    timeout_seconds: float = 600.0
    reset_limit: int | None = None


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

    def end(self) -> None:
        ray.kill(self._actor)


@dataclass(eq=False)
class Member:
    """A worker in a generation; its number identifies it among all workers of the job."""

    host: str
    local_rank: int
    number: int
    worker: ActorWorker
    rank: int = 0


class Generations:
    """The generations of an elastic job, whose workers `lockstep.world.generations` describes.

    Args:
        hosts: Return the hosts that the job may use now.
        start: Start a worker on a host with a local rank and these environment variables.
        look: Called regularly.
        address: This machine's address, at which the workers reach it.
    """

    def __init__(
        self,
        rules: ElasticRules,
        hosts: Callable[[], Sequence[Host]],
        start: Callable[[str, int, Mapping[str, str]], ActorWorker],
        look: Callable[[], None],
        address: str,
    ) -> None:
        self._rules = rules
        self._hosts = hosts
        self._start = start
        self._look = look
        self._address = address
        self._timings = Timings()
        self._changed = asyncio.Event()
        self._staying = StayingWorkers(self._changed)
        self._members: list[Member] = []  # those that run, by rank
        self._finished: list[Member] = []
        self._failure = ""
        self._number = 0
        self._run_id = token_hex(8)
        self.is_cancelled = threading.Event()

    async def run(self) -> list[Any]:
        """Run the job, and return the results of the workers that finished, by rank.

        Raises:
            JobFailedError: The job cannot continue.
        """
        await self._staying.open(self._address)
        try:
            while self._members or not self._finished:
                store = self._form(await self._wait_for_places())
                await self._follow()
                del store
                await self._leave()
                self._number += 1
        finally:
            for member in self._members:
                member.worker.end()
            self._staying.close()
        return [member.worker.result for member in sorted(self._finished, key=lambda member: member.rank)]

    async def _wait_for_places(self) -> list[tuple[str, int, Member | None]]:
        deadline = time.monotonic() + self._rules.timeout_seconds
        while len(places := self._places()) < self._rules.minimum:
            if time.monotonic() > deadline:
                raise JobFailedError(
                    f"there were only {len(places)} slots within the elastic timeout of "
                    f"{self._rules.timeout_seconds:g} s; the job needs {self._rules.minimum}"
                )
            await self._wait()
        return places

    def _places(self) -> list[tuple[str, int, Member | None]]:
        """Return host, local rank and worker, if it runs already, by rank in the next generation."""
        hosts = {host.name: host.slots for host in self._hosts()}
        taken: dict[tuple[str, int], Member | None] = {}
        for member in self._members:
            if sum(host == member.host for host, _ in taken) < hosts.get(member.host, 0):
                taken[member.host, member.local_rank] = member
        for name, slots in hosts.items():
            for local_rank in range(2 * slots):
                if sum(host == name for host, _ in taken) < slots:
                    taken.setdefault((name, local_rank))
        first = list(taken.items())[: self._rules.maximum]
        order = list(dict.fromkeys(host for (host, _), _ in first))
        return [(*place, member) for place, member in sorted(first, key=lambda each: order.index(each[0][0]))]

    def _form(self, places: Sequence[tuple[str, int, Member | None]]) -> Any:
        """Start a generation; return its store, which is served while it is referenced."""
        store, port = serve_store(self._address)
        hosts = [host for host, *_ in places]
        environments = worker_variables(hosts, [()] * len(hosts), self._address, port)
        kept = [member for *_, member in places if member]
        for member in self._members:
            if member not in kept:
                member.worker.end()
        self._members, self._failure = [], ""
        for rank, ((host, local_rank, known), variables) in enumerate(zip(places, environments, strict=True)):
            number = known.number if known else next(self._staying.numbers)
            variables |= {"LOCAL_RANK": str(local_rank), "HOROVOD_LOCAL_RANK": str(local_rank)}
            variables |= {RESTART_COUNT: str(self._number), TORCHRUN_ID: self._run_id, "HOROVOD_ELASTIC": "1"}
            variables[NODE_PROCESS] = self._staying.address_for(number)
            if known and self._staying.waits(number):  # else it has just exited, which `_follow` notices
                self._staying.answer(number, variables)
            member = known or Member(host, local_rank, number, self._start(host, local_rank, variables))
            member.rank = rank
            self._members.append(member)
        return store

    async def _follow(self) -> None:
        """Wait until the generation is over: all workers have finished, one has failed, or one waits for the next."""
        is_told = False
        while self._members and not (self._failure or self._waiting()):
            await self._wait()
            now = {(member.host, member.local_rank) for member in self._members}
            then = {(host, local_rank) for host, local_rank, _ in self._places()}
            if not is_told and now != then and len(then) >= self._rules.minimum and not self._finished:
                self._staying.tell({"change": bool(then - now) * ADDED | bool(now - then) * REMOVED})
                is_told = True

    async def _leave(self) -> None:
        """Wait until the workers that stay wait for the next generation; end the others."""
        self._staying.tell({"over": True})
        settled, late = (time.monotonic() + seconds for seconds in (self._timings.settle, self._timings.leave))
        while busy := [member for member in self._members if not self._staying.waits(member.number)]:
            for member in busy:
                limit = late if self._staying.stays(member.number) else settled
                if time.monotonic() > limit:
                    member.worker.end()
                    self._members.remove(member)
            await self._wait()
        if self._finished and self._failure:
            raise JobFailedError(f"{self._failure} after other workers had finished")
        if self._finished:
            for member in self._members:
                member.worker.end()
            self._members = []
        elif not self._members:
            raise JobFailedError(f"{self._failure}, and no worker with a usable state is left")
        elif self._rules.reset_limit is not None and self._number >= self._rules.reset_limit:
            raise JobFailedError(f"{self._failure}; the reset limit of {self._rules.reset_limit} is reached")

    def _waiting(self) -> bool:
        return any(self._staying.waits(member.number) for member in self._members)

    async def _wait(self) -> None:
        """Wait for a moment, and note which workers have ended."""
        await asyncio.sleep(POLL_SECONDS)
        if self.is_cancelled.is_set():
            raise JobFailedError("the program was interrupted")
        self._look()
        for member in list(self._members):
            if (how := member.worker.poll()) is None:
                continue
            self._members.remove(member)
            member.worker.end()
            if how:
                self._failure = f"worker {member.rank} {how}"
            else:
                self._finished.append(member)


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
            while (slots := slots_of(discovered.hosts)) < self.rules.minimum:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"found {slots} slots within {self.rules.timeout_seconds:g} s (elastic_timeout), but the job "
                        f"needs {self.rules.minimum} workers, each with {self.cpus:g} CPUs and {self.gpus:g} GPUs"
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

            def start(host: str, local_rank: int, variables: Mapping[str, str]) -> ActorWorker:
                actor: Any = kind.options(
                    num_cpus=self.cpus, num_gpus=self.gpus, resources={f"node:{host}": 0.001}
                ).remote()
                calls = [actor.update_env_vars.remote({**variables, **self.environment})]
                if self.gpus:
                    here = next((each.slots for each in discovered.hosts if each.name == host), 0)
                    calls.append(actor.see_gpus.remote(local_rank, here))
                calls.append(actor.set_queue.remote(reports.queue))
                calls.append(actor.start_executable.remote(*self.executable))
                return ActorWorker(actor, [*calls, actor.execute.remote(fn)], errors)

            address = ray.util.get_node_ip_address()
            generations = Generations(self.rules, lambda: discovered.hosts, start, reports.deliver, address)
            # In a thread, because the caller may run a loop of its own, as notebooks do.
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(asyncio.run, generations.run())
                try:
                    return running.result()
                except JobFailedError as error:
                    raise RuntimeError(f"{PROCESS_FAILED} {error}") from (errors[-1] if errors else None)
                finally:
                    generations.is_cancelled.set()

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
