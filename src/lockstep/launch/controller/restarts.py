"""Jobs that continue after a failure, on the hosts that remain or have returned: generation by generation.

Workers that can continue keep their processes (`lockstep.world.generations`); the others are ended and started again,
and restore their state themselves, from their hosts' memory (`lockstep.launch.node.job_folders`) or from a checkpoint.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lockstep.errors import CheckpointError, ConfigError, plural
from lockstep.files.output import say
from lockstep.launch.controller.discovery import FLAG, Discovery, discover
from lockstep.launch.controller.host_process import start_process
from lockstep.launch.controller.job_outcome import STOPPED, JobEnd, JobOutcome
from lockstep.launch.controller.job_run import JobRun
from lockstep.launch.controller.job_signals import STOP
from lockstep.launch.controller.job_start import prepare_spare
from lockstep.launch.controller.remote_node import NodePool
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.node.job_folders import new_snapshots_path
from lockstep.launch.output import Display, OutputPlan
from lockstep.launch.plan.hosts import Host, first_slots, names_of_this_machine, slots_of
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, RestartOptions, offered_hosts, on_hosts, plan_from
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import NO_MESSAGE
from lockstep.observe.job_steps import JobSteps
from lockstep.world import STARTED
from lockstep.world.devices import usable_cores
from lockstep.world.generations import ADDED, REMOVED

# Exit codes of workers that stop at a change of hosts, because one of them cannot stay: after a checkpoint, or after a
# failure to write one, because the snapshots in memory remain.
RESIZED = (STOPPED, CheckpointError.exit_code)
NO_STATE = "lockstep: not restarting: no worker with the job's state is left"


@dataclass(frozen=True)
class ElasticJob:
    """A job whose workers may have more than one generation.

    Args:
        plan: The plan of the first generation.
        hosts: All hosts that the job may use, in the order of ranks, with all their slots.
        plan_on: Return the plan for other hosts.
        can_resize: The workers can leave a generation between two steps, so their number can change without a failure.
        slots_per_host: Slots of a discovery script's hosts without a number.
        failure_code: The exit code if a worker failed; None: the worker's exit code.
        describe_resume: Return the newest checkpoint and the command that resumes from it; "" without a checkpoint.
        must_stay: Only workers have the job's state, so it fails if no host has it.
        limit_flag: The flag that limits the restarts.
    """

    plan: JobPlan
    hosts: Sequence[Host]
    plan_on: Callable[[Sequence[Host]], JobPlan]
    options: RestartOptions
    can_resize: bool
    slots_per_host: int | None = None
    failure_code: int | None = None
    describe_resume: Callable[[], str] = str
    must_stay: bool = False
    limit_flag: str = "--max-restarts"


def elastic_job(
    plan: JobPlan,
    where: LaunchOptions,
    options: RestartOptions,
    gpus: Callable[[], int],
    can_resize: bool = False,
    describe_resume: Callable[[], str] = str,
    variables: Mapping[str, str] | None = None,
) -> ElasticJob:
    """Return the job that starts with `plan`, which was derived from the launch options `where`.

    Args:
        gpus: Count the GPUs of this machine.
        can_resize: As for `ElasticJob`.
        describe_resume: As for `ElasticJob`.
        variables: More variables of the workers.
    """
    here, cores, environment = names_of_this_machine(), usable_cores(), dict(plan.own_environment)

    def plan_on(hosts: Sequence[Host]) -> JobPlan:
        elsewhere = on_hosts(where, hosts)
        other = plan_from(elsewhere, slots_of(hosts), plan.command, environment, cores, gpus, here)
        return replace(other, added=plan.added, environment={**other.environment, **(variables or {})})

    offered = offered_hosts(where, environment, gpus, plan)
    return ElasticJob(plan, offered, plan_on, options, can_resize, describe_resume=describe_resume)


def first_hosts(where: LaunchOptions, options: RestartOptions) -> LaunchOptions:
    """Return the launch options for the first generation, with the discovery script's hosts if no others are given.

    Raises:
        ConfigError: The script fails, prints no slot, or would name other hosts than manually started nodes.
    """
    script = options.host_discovery_script
    if script and where.is_manual:
        raise ConfigError(f"{FLAG} cannot be combined with --nodes, which defines the hosts; remove one of them")
    if not script or where.names_hosts:
        return where
    hosts = [host for host in discover(script, None) if host.slots]
    if not hosts:
        raise ConfigError(f"{FLAG} {script} prints no slot; a line is host:slots, such as localhost:2")
    return on_hosts(where, hosts)


def run_elastic_job(
    job: ElasticJob, output: OutputPlan, steps: JobSteps | None = None, end: JobEnd | None = None
) -> int:
    """Execute a job with its restarts, and return its exit code, as `JobSeries.run` does.

    Raises:
        ConfigError: The discovery script fails at its first call, or the output's folder cannot be written.
    """
    display = Display(replace(output, workers=max(output.workers, job.options.max_np or 0)))
    script = job.options.host_discovery_script
    discovery = Discovery(script, job.slots_per_host) if script else None
    try:
        hosts = (lambda: discovery.hosts) if discovery else (lambda: job.hosts)
        return asyncio.run(Generations(job, hosts, display, steps, end).run())
    finally:
        display.close()
        if discovery:
            discovery.stop()


class Membership:
    """The hosts of an elastic job over time.

    Args:
        offered: Return all hosts that the job may use now, in the order of ranks.
        plan_on: Return the plan for some hosts.
        most: The maximum number of workers.
    """

    def __init__(
        self,
        offered: Callable[[], Sequence[Host]],
        plan_on: Callable[[Sequence[Host]], JobPlan],
        most: int,
        timings: Timings,
    ) -> None:
        self._offered = offered
        self._plan_on = plan_on
        self._most = most
        self._timings = timings
        self._lost: dict[str, float] = {}  # each host, with the time of its next probe
        self._warning = ""

    def lose(self, hosts: Sequence[str], in_trouble: bool) -> None:
        """Mark hosts as lost or, with `in_trouble`, as unable to start their part."""
        due = time.monotonic() + (self._timings.trouble if in_trouble else 0.0)
        self._lost |= dict.fromkeys(hosts, due)

    def slots(self, present: Sequence[str]) -> tuple[Host, ...]:
        """Return the slots to use now, of hosts that are not lost; hosts in `present`, already in use, come first."""
        there = [host for host in self._offered() if host.slots and host.name not in self._lost]
        rank = {name: number for number, name in enumerate(present)}
        there.sort(key=lambda host: rank.get(host.name, len(rank)))
        return first_slots(there, min(self._most, slots_of(there))) if there else ()

    def unused(self, present: Sequence[str]) -> list[Host]:
        """Return the hosts with slots that are neither lost nor in `present`."""
        return [host for host in self._offered() if host.slots and host.name not in {*self._lost, *present}]

    def plan(self, hosts: Sequence[Host]) -> JobPlan | None:
        """Return the plan for these hosts; None if it is impossible, with a warning the first time."""
        try:
            return self._plan_on(hosts)
        except ConfigError as error:
            if str(error) != self._warning:
                say(f"lockstep: {error}; keeping the previous hosts")
            self._warning = str(error)
            return None

    async def probe(self, seconds: float | None = None) -> None:
        """Probe the lost hosts; each has `seconds` to answer, or the default time."""
        offered = {host.name: host for host in self._offered() if host.slots}
        due = [offered[name] for name, when in self._lost.items() if when <= time.monotonic() and name in offered]
        back = await asyncio.gather(*(self._is_back(host, seconds or self._timings.probe) for host in due))
        for host, is_back in zip(due, back, strict=True):
            self._lost[host.name] = time.monotonic() + self._timings.probe_every
            if is_back:
                del self._lost[host.name]

    async def _is_back(self, host: Host, seconds: float) -> bool:
        """Whether Lockstep can be started on a host: its node process exits immediately without a message."""
        if not (plan := self.plan([host])):
            return False
        if plan.nodes[0].is_relayed and plan.others:
            return await plan.others.is_present(host.name, seconds)
        try:
            process = await start_process(plan.nodes[0].start, plan.nodes[0].is_here)
        except StartError:
            return False
        await process.close(seconds)
        return process.exit_code == NO_MESSAGE


class Generations:
    """The consecutive generations of a job's workers."""

    def __init__(
        self,
        job: ElasticJob,
        hosts: Callable[[], Sequence[Host]],
        display: Display,
        steps: JobSteps | None,
        end: JobEnd | None = None,
    ) -> None:
        self._job = job
        self._steps = steps
        self._end = end or JobEnd()
        self._options = job.options
        self._display = display
        self._least = job.options.min_np or job.plan.workers
        self._most = job.options.max_np or job.plan.workers
        self._timings = job.plan.timings
        self._membership = Membership(hosts, job.plan_on, self._most, self._timings)
        self._started = f"{time.time():.3f}"
        self._snapshots = str(new_snapshots_path())
        self._pool = NodePool()
        self._number = 0
        self._loss = ""
        self._restarts = 0
        self._resizing = False
        self._was_resized = self._goes_on = False  # after the last generation

    async def run(self) -> int:
        plan, before = self._job.plan, list[str]()
        notice, staying = None, tuple[str, ...]()
        try:
            while True:
                self._resizing = self._was_resized = self._goes_on = False
                hosts = [node.host for node in plan.nodes]
                newcomers = tuple(host for host in hosts if host not in before)
                numbered = self._numbered(plan, newcomers)
                generation = JobRun(numbered, self._display, self._pool, self._steps, notice, staying, self._end)
                self._end.restarts = self._restarts
                watch = asyncio.create_task(self._watch(generation, plan))
                try:
                    outcome = await generation.run(partial(self._judge, watch), keeps_signals=True)
                finally:
                    watch.cancel()
                if outcome.request and self._number and not (generation.has_started or self._goes_on):
                    return self._stopped_between(outcome.request)
                generation.report(outcome, self._was_resized)
                if not self._goes_on:
                    self._explain_no_restart(outcome)
                    return outcome.exit_code(self._job.failure_code)
                self._restarts += not self._was_resized
                self._number += 1
                why = outcome.culprit.brief() if outcome.culprit else "the workers left their generation"
                self._loss = (
                    f"{generation.failed_at or time.time():.3f} {'the hosts changed' if self._was_resized else why}"
                )
                elsewhere = {node.host for node in plan.nodes if not node.is_here}
                self._membership.lose([host for host in outcome.away if host in elsewhere], bool(outcome.trouble))
                if outcome.must_lead:  # the host of rank 0 comes first
                    hosts.sort(key=lambda host: host not in outcome.staying)
                following = await self._wait_for_slots(generation, outcome, hosts)
                if (request := generation.signals.request) and _ends_job(request, outcome):
                    return self._stopped_between(request)
                is_lost = following is not None and loses_state(following, outcome)
                if is_lost and self._job.must_stay:
                    say(NO_STATE)
                if following is None or (is_lost and self._job.must_stay):
                    return outcome.exit_code(self._job.failure_code)
                plan, before = following, hosts
                notice, staying = generation.signals.notice, () if outcome.must_lead else tuple(outcome.staying)
                self._announce(plan, outcome.staying)
                if is_lost:
                    say("lockstep: no worker that had the last commit is left: the script starts again without it")
        finally:
            await self._pool.close()

    def _numbered(self, plan: JobPlan, newcomers: tuple[str, ...]) -> JobPlan:
        most = self._options.max_restarts
        timings = self._timings
        if self._restarts >= most and not self._job.can_resize:  # no worker stays after this generation
            timings = replace(timings, leave=timings.worker_end)
        return replace(
            plan,
            environment={**plan.environment, STARTED: self._started},
            timings=timings,
            snapshots=self._snapshots,
            newcomers=newcomers,
            generation=self._number,
            max_restarts=most,
            direct_stdout=self._job.plan.direct_stdout,
            loss=self._loss,
        )

    def _judge(self, watch: asyncio.Task[None], outcome: JobOutcome) -> bool:
        """Decide, once, whether to start another generation."""
        watch.cancel()  # a change of hosts no longer matters to this generation
        code = outcome.culprit.code if outcome.culprit else outcome.code
        left_together = outcome.culprit is None and outcome.may_succeed_again
        resized = self._resizing and outcome.request is None and (code in RESIZED or left_together)
        may_succeed = outcome.may_succeed_again or (outcome.trouble is not None and self._number > 0)
        retryable = may_succeed and (bool(outcome.staying) or not self._job.must_stay)
        left = self._restarts < self._options.max_restarts
        ends = _ends_job(outcome.request, outcome)
        self._was_resized, self._goes_on = resized, resized or (not ends and left and retryable)
        return self._goes_on

    def _explain_no_restart(self, outcome: JobOutcome) -> None:
        if outcome.request or not (outcome.culprit or outcome.trouble or outcome.staying):
            return
        if outcome.culprit and outcome.culprit.final:
            say("lockstep: not restarting: the error is permanent")
        elif self._job.must_stay and not outcome.staying:
            say(NO_STATE)
        elif self._restarts or not self._options.max_restarts:
            say(f"lockstep: not restarting again: {self._job.limit_flag} {self._options.max_restarts}")

    def _stopped_between(self, request: signal.Signals) -> int:
        """Report a stop that was requested while no worker ran, and return the exit code."""
        resume = self._job.describe_resume()
        say(f"lockstep: stopped by {request.name} between two generations of the workers{resume and f'; {resume}'}")
        outcome = JobOutcome(STOPPED if resume else 128 + request, request=request)
        self._end.add(outcome, self._job.plan.workers)
        return outcome.code

    def _announce(self, plan: JobPlan, staying: Mapping[str, int]) -> None:
        where = "" if plan.is_local else f": {', '.join(f'{node.workers} on {node.host}' for node in plan.nodes)}"
        workers = plural(plan.workers, "worker")
        count = "resized" if self._was_resized else f"restart {self._restarts} of {self._options.max_restarts}"
        stay = sum(min(staying.get(node.host, 0), node.workers) for node in plan.nodes)
        kept = f", of which {stay} {'stays' if stay == 1 else 'stay'}" if stay else ""
        say(f"lockstep: {count}, with {workers}{kept}{where}")

    async def _wait_for_slots(self, generation: JobRun, outcome: JobOutcome, present: Sequence[str]) -> JobPlan | None:
        """Wait for enough slots and return the plan of the next generation; None after the timeout or on a stop."""
        deadline = time.monotonic() + self._options.elastic_timeout
        seconds, is_reported = self._timings.first_probe, False
        while True:
            if slots_of(self._membership.slots(present)) < self._most:
                await self._membership.probe(seconds)
            seconds = self._timings.probe
            if _ends_job(generation.signals.request, outcome):
                return None
            hosts = self._membership.slots(present)
            if slots_of(hosts) >= self._least and (plan := self._membership.plan(hosts)):
                return plan
            left = f"{slots_of(hosts)} slots are left, but the job needs {self._least} (--min-np)"
            if time.monotonic() > deadline:
                say(f"lockstep: {left}; no host came back within --elastic-timeout {self._options.elastic_timeout:g} s")
                return None
            if not is_reported:
                say(f"lockstep: {left}; waiting for hosts")
                is_reported = True
            await asyncio.sleep(self._timings.look)

    async def _watch(self, generation: JobRun, plan: JobPlan) -> None:
        """While the workers run, let them leave their generation when the slots change, so that they can be resized."""
        present, since = [node.host for node in plan.nodes], None
        while not generation.has_started and self._options.spares:
            await asyncio.sleep(self._timings.look)
        await self._prepare_spares(present)
        while self._job.can_resize:
            await asyncio.sleep(self._timings.look)
            since = since or (time.monotonic() if generation.has_started else None)
            await self._membership.probe()
            hosts = self._membership.slots(present)
            if since is None or time.monotonic() - since < self._timings.settled or slots_of(hosts) < self._least:
                continue
            if (other := self._membership.plan(hosts)) and _workers(other) != _workers(plan):
                self._resizing = True
                say(f"lockstep: {slots_of(hosts)} slots are available; the workers change after the current step")
                before, after = Counter(dict(_workers(plan))), Counter(dict(_workers(other)))
                generation.tell_of_change(bool(after - before) * ADDED | bool(before - after) * REMOVED)
                return

    async def _prepare_spares(self, present: Sequence[str]) -> None:
        """Prepare hosts that are not in use, until they have as many slots as there are to be spares."""
        slots = 0
        for host in self._membership.unused(present):
            plan = self._membership.plan([host]) if slots < self._options.spares else None
            if plan is None:
                continue
            try:
                if not self._pool.holds(plan.nodes[0]):
                    await prepare_spare(self._numbered(plan, (host.name,)), self._pool)
                slots += host.slots
            except (StartError, TimeoutError) as error:
                say(f"lockstep: the spare {host.name} cannot be prepared: {error or 'no answer in time'}")
                self._membership.lose([host.name], True)


def _ends_job(request: signal.Signals | None, outcome: JobOutcome) -> bool:
    """Whether a request ends the job: a notice is left to workers that stay, who write the checkpoint it asks for."""
    return request is not None and (request in STOP or not outcome.staying or outcome.must_lead)


def loses_state(following: JobPlan, outcome: JobOutcome) -> bool:
    """Whether only workers had the job's state, and none of them stays on the next generation's first host."""
    return outcome.must_lead and following.nodes[0].host not in outcome.staying


def _workers(plan: JobPlan) -> list[tuple[tuple[str, ...], int]]:
    """Return the number of workers on each machine, identified by `NodePlan.key`."""
    return [(node.key, node.workers) for node in plan.nodes]
