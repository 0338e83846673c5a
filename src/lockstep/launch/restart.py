"""The job that outlives its workers: after a failure all of them are started anew, on the hosts that are there.

A failure ends every worker within seconds, as in any job of the launcher; then the next start has the hosts that
remain or have returned. What the workers had done they find again themselves: in their hosts' memory
(`lockstep.launch.snapshot_memory`), or in a checkpoint.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lockstep.errors import ConfigError
from lockstep.launch.discovery import Discovery
from lockstep.launch.display import Display, OutputPlan, say
from lockstep.launch.hosts import Host, first_slots, names_of_this_machine, slots_of
from lockstep.launch.job import STOPPED, Job, Outcome
from lockstep.launch.options import LaunchOptions, offered_hosts, on_hosts, plan_from
from lockstep.launch.plan import JobPlan
from lockstep.launch.restart_options import RestartOptions
from lockstep.launch.snapshot_memory import new_path
from lockstep.launch.wire import NOBODY_SPOKE
from lockstep.world import usable_cores

LOOK_SECONDS = 1.0
KNOCK_EVERY_SECONDS = 15.0  # at a host that was lost
KNOCK_SECONDS = 5.0
SETTLED_SECONDS = 5.0  # between the workers' start and a change of their number


@dataclass(frozen=True)
class ElasticJob:
    """A job whose workers may be started more than once.

    Args:
        plan: The first start.
        hosts: All that the job may have, in the order of ranks, with all their slots.
        plan_on: The plan for other hosts.
        can_regroup: The workers stop after a step with a checkpoint when they get SIGUSR1, so that their number can
            change without a failure.
        slots_per_host: For a discovery script's hosts without a number.
        failure_code: The exit code when a worker has failed; None: the worker's own.
    """

    plan: JobPlan
    hosts: Sequence[Host]
    plan_on: Callable[[Sequence[Host]], JobPlan]
    options: RestartOptions
    can_regroup: bool
    slots_per_host: int | None = None
    failure_code: int | None = None


def elastic_job(
    plan: JobPlan,
    where: LaunchOptions,
    options: RestartOptions,
    gpus: Callable[[], int],
    can_regroup: bool = False,
    words_of_now: Callable[[], list[str]] = list,
) -> ElasticJob:
    """The job that begins with a plan, which follows from what the user says of where it runs.

    Args:
        words_of_now: What its command has at the end in any further start.

    Raises:
        ConfigError: Its nodes are started by hand.
    """
    if plan.by_hand:
        raise ConfigError(
            "--max-restarts and its like need a launcher that reaches all hosts, but --nodes has each started by hand; "
            "use -H, or a batch job"
        )
    here, cores, environment = names_of_this_machine(), usable_cores(), dict(plan.own_environment)

    def plan_on(hosts: Sequence[Host]) -> JobPlan:
        elsewhere = on_hosts(where, hosts)
        command = [*plan.command, *words_of_now()]
        return plan_from(elsewhere, slots_of(hosts), command, environment, cores, gpus, here)

    return ElasticJob(plan, offered_hosts(where, environment, gpus, plan), plan_on, options, can_regroup)


def choose(hosts: Sequence[Host], away: Collection[str], most: int) -> tuple[Host, ...]:
    """The slots to use: those of the hosts that are there, in their order, up to `most`."""
    there = [host for host in hosts if host.slots and host.name not in away]
    return first_slots(there, min(most, slots_of(there))) if there else ()


def run_elastic_job(job: ElasticJob, output: OutputPlan, direct_stdout: bool = False) -> int:
    """Carry out a job, with as many starts as it may have, and return its exit code, as `run_job` does.

    Raises:
        ConfigError: The discovery script fails at its first call, or there can be no files for the output.
    """
    display = Display(replace(output, workers=max(output.workers, job.options.max_np or 0)))
    script = job.options.host_discovery_script
    discovery = Discovery(script, job.slots_per_host, lambda hosts: None) if script else None
    try:
        hosts = (lambda: discovery.hosts) if discovery else (lambda: job.hosts)
        return asyncio.run(_Starts(job, hosts, display, direct_stdout).run())
    finally:
        display.close()
        if discovery:
            discovery.stop()


class _Starts:
    """The starts of a job's workers, one after the other."""

    def __init__(
        self, job: ElasticJob, hosts: Callable[[], Sequence[Host]], display: Display, direct_stdout: bool
    ) -> None:
        self._job = job
        self._options = job.options
        self._hosts = hosts
        self._display = display
        self._direct_stdout = direct_stdout
        self._least = job.options.min_np or job.plan.workers
        self._most = job.options.max_np or job.plan.workers
        self._restarts = 0
        self._starts = 0
        self._snapshots = str(new_path())
        self._regrouping = False
        self._lost: dict[str, float] = {}  # hosts, and when to knock there
        self._refused: set[str] = set()  # hosts that cannot take part, as they are

    async def run(self) -> int:
        plan = self._job.plan
        while True:
            self._regrouping = False
            attempt = Job(self._numbered(plan), self._display, self._direct_stdout)
            watch = asyncio.create_task(self._watch(attempt, plan))
            try:
                outcome = await attempt.run(self._goes_on)
            finally:
                watch.cancel()
            if not self._is_regrouped(outcome):
                attempt.tell(outcome)
            if not self._goes_on(outcome):
                self._say_why_not(outcome)
                return outcome.exit_code(self._job.failure_code)
            if not self._is_regrouped(outcome):
                self._restarts += 1
            self._starts += 1
            self._note_away(outcome)
            hosts = await self._gather(attempt)
            if not hosts:
                return 128 + attempt.request if attempt.request else outcome.exit_code(self._job.failure_code)
            plan = self._job.plan_on(hosts)
            self._announce(plan)

    def _numbered(self, plan: JobPlan) -> JobPlan:
        most = self._options.max_restarts
        return replace(plan, snapshots=self._snapshots, restart=self._starts, max_restarts=most)

    def _goes_on(self, outcome: Outcome) -> bool:
        """Whether the workers are to be started anew."""
        if self._is_regrouped(outcome):
            return True
        if outcome.request or self._restarts >= self._options.max_restarts:
            return False
        return outcome.may_go_on or (outcome.trouble is not None and self._starts > 0)

    def _is_regrouped(self, outcome: Outcome) -> bool:
        """Whether the workers have stopped because their number is to change."""
        by_us = self._regrouping and outcome.request is None
        code = outcome.culprit.code if outcome.culprit else outcome.code
        return by_us and code in (STOPPED, -signal.SIGUSR1)  # which ends a worker that does not listen yet

    def _say_why_not(self, outcome: Outcome) -> None:
        most = self._options.max_restarts
        if outcome.culprit and outcome.culprit.final:
            say("lockstep: the workers are not started anew: the same would come again")
        elif outcome.culprit and most and not outcome.request:
            say(f"lockstep: the workers are not started anew once more: --max-restarts {most}")

    def _announce(self, plan: JobPlan) -> None:
        where = "" if plan.is_local else f": {', '.join(f'{node.workers} on {node.host}' for node in plan.nodes)}"
        workers = f"{plan.workers} worker{'s' if plan.workers > 1 else ''}"
        count = f"restart {self._restarts} of {self._options.max_restarts}" if self._restarts else "regrouped"
        say(f"lockstep: {count}, with {workers}{where}")

    def _note_away(self, outcome: Outcome) -> None:
        for host in outcome.away:
            if outcome.trouble:
                self._refused.add(host)
            else:
                self._lost[host] = 0.0

    def _away(self) -> set[str]:
        return {*self._lost, *self._refused}

    async def _gather(self, attempt: Job) -> tuple[Host, ...]:
        """The slots for the next start, when there are enough; none if there are not in time, or the job is stopped."""
        deadline = time.monotonic() + self._options.elastic_timeout
        told = False
        while not attempt.request:
            await self._knock()
            hosts = choose(self._hosts(), self._away(), self._most)
            if slots_of(hosts) >= self._least:
                return hosts
            left = f"{slots_of(hosts)} slots are left, the job needs {self._least} (--min-np)"
            if time.monotonic() > deadline:
                say(f"lockstep: {left}; none came back in --elastic-timeout {self._options.elastic_timeout:g} s")
                return ()
            if not told:
                say(f"lockstep: {left}; waiting for hosts")
                told = True
            await asyncio.sleep(LOOK_SECONDS)
        return ()

    async def _watch(self, attempt: Job, plan: JobPlan) -> None:
        """While the workers run: have them stop and regroup when the hosts are others."""
        now = [(node.host, node.workers) for node in plan.nodes]
        since = None
        while self._job.can_regroup:
            await asyncio.sleep(LOOK_SECONDS)
            since = since or (time.monotonic() if attempt.has_started else None)
            await self._knock()
            hosts = choose(self._hosts(), self._away(), self._most)
            then = [(host.name, host.slots) for host in hosts]
            settled = since is not None and time.monotonic() - since > SETTLED_SECONDS
            if settled and then != now and slots_of(hosts) >= self._least and not self._is_same(plan, hosts):
                self._regrouping = True
                say(f"lockstep: there are {slots_of(hosts)} slots now; the workers stop after a step and regroup")
                attempt.ask_to_stop()
                return

    def _is_same(self, plan: JobPlan, hosts: Sequence[Host]) -> bool:
        """Whether those hosts would have the same workers: this machine has several names."""
        other = self._job.plan_on(hosts)
        return [(node.start, node.workers) for node in other.nodes] == [
            (node.start, node.workers) for node in plan.nodes
        ]

    async def _knock(self) -> None:
        """Find out which of the lost hosts are back."""
        due = [host for host, when in self._lost.items() if when <= time.monotonic()]
        slots = {host.name: host for host in self._hosts()}
        back = await asyncio.gather(*(self._is_back(slots[host]) for host in due if host in slots))
        for host, is_back in zip([host for host in due if host in slots], back, strict=True):
            self._lost[host] = time.monotonic() + KNOCK_EVERY_SECONDS
            if is_back:
                del self._lost[host]

    async def _is_back(self, host: Host) -> bool:
        """Whether Lockstep can be started there: its node process ends at once when nobody speaks to it."""
        start = self._job.plan_on([host]).nodes[0].start
        process = await asyncio.create_subprocess_exec(
            *start,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin
        process.stdin.close()
        try:
            return await asyncio.wait_for(process.wait(), KNOCK_SECONDS) == NOBODY_SPOKE
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            return False
