"""An elastic job on this machine: the driver runs in this process; the node process starts and ends the workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lockstep.launch.controller.discovery import Discovery
from lockstep.launch.controller.elastic_driver import POLL_SECONDS, Driver, HostSlot, JobFailedError
from lockstep.launch.controller.failure import JobOutcome, describe_exit
from lockstep.launch.controller.job import LaunchedJob
from lockstep.launch.controller.remote_node import Lost, NodePool, Remote
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.output import Display, Name, OutputPlan, Screen
from lockstep.launch.plan.horovodrun_plan import ElasticPlan
from lockstep.launch.plan.hosts import Host, names_of_this_machine, slots_here, slots_of
from lockstep.launch.protocol.messages import Ended, NodeJob, NodeReady, SignalSlotWorker, StartSlotWorker

FAILED = 1


class RanksDisplay(Display):
    """Prefixes the workers' lines with their current ranks: `ranks`, by worker number."""

    def __init__(self, plan: OutputPlan) -> None:
        super().__init__(plan)
        self.ranks: dict[int, int] = {}

    def keep(self, rank: int, name: Name, lines: Sequence[bytes]) -> None:
        super().keep(self.ranks[rank], name, lines)

    def show(self, rank: int, name: Name, lines: Sequence[bytes]) -> None:
        super().show(self.ranks[rank], name, lines)


class SlotProcess:
    """A worker's process, started and watched by the node process."""

    def __init__(self, number: int, node: Remote, display: RanksDisplay) -> None:
        self._number = number
        self._node = node
        self._display = display

    def poll(self) -> str | None:
        code = self._node.exit_codes.get(self._number)
        if not code:
            return None if code is None else ""
        return describe_exit(code)

    def end(self, number: signal.Signals) -> None:
        self._node.send(SignalSlotWorker(self._number, number))

    def take_rank(self, rank: int) -> None:
        self._display.ranks[self._number] = rank


class LocalElasticJob(LaunchedJob):
    """A job whose driver starts and replaces workers one by one."""

    def __init__(self, plan: ElasticPlan, hosts: Callable[[], Sequence[Host]], display: RanksDisplay) -> None:
        super().__init__(plan.job, display, False, NodePool())
        self._screen = Screen(display, holds=False)  # the job survives most failures
        self._display = display
        self._rules = plan
        self._hosts = hosts
        self._processes: list[SlotProcess] = []
        self._why_failed: JobFailedError | None = None

    async def _start(self) -> None:
        self._driver, _ = await asyncio.gather(self._make_driver(), super()._start())

    async def _make_driver(self) -> Driver:
        """Import torch here while the preloaded process does, after the node process has been started."""
        await self._remotes[0].answer(NodeReady)
        return await asyncio.to_thread(Driver, self._rules, self._hosts, self._start_worker)

    def _first_message(self, remote: Remote, secret: str, slots: tuple[int, ...]) -> NodeJob:
        return replace(super()._first_message(remote, secret, slots), elastic=True)

    def _start_worker(self, slot: HostSlot, variables: Mapping[str, str]) -> SlotProcess:
        number, (node,) = len(self._processes), self._remotes
        self._display.ranks[number] = slot.number
        node.send(StartSlotWorker(number, dict(variables)))
        self._processes.append(SlotProcess(number, node, self._display))
        return self._processes[-1]

    async def _follow(self) -> list[Ended | Lost | None]:
        try:
            while not self._is_over():
                await asyncio.sleep(POLL_SECONDS)
        except JobFailedError as error:
            self._why_failed = error
        return []

    def _is_over(self) -> bool:
        """Advance the job; return whether it is over."""
        if self._give_up.is_set() or self._remotes[0].end.done():
            return True
        if self._stop:
            return all(process.poll() is not None for process in self._processes)
        return self._driver.step()

    def _judge(
        self, ended: Sequence[Ended | Lost | None], given_up: bool, trouble: StartError | None, away: tuple[str, ...]
    ) -> JobOutcome:
        outcome = super()._judge([remote.outcome() for remote in self._remotes], given_up, trouble, away)
        if outcome.code:
            return outcome
        if self._stop:
            return JobOutcome(128 + self._stop, request=self._stop)
        if self._why_failed:
            return JobOutcome(FAILED, trouble=JobFailedError(f"{self._why_failed}; all workers have exited"))
        return outcome


def run_elastic(plan: ElasticPlan, output_plan: OutputPlan) -> int:
    """Execute a plan and wait for its end.

    Returns:
        0 when workers have finished and none failed after that, 1 when the job failed, 128 + N after signal N.

    Raises:
        ConfigError: The discovery script fails at its first call, or the output's folder cannot be written.
    """
    display, discovery = RanksDisplay(output_plan), None

    def hosts() -> tuple[Host, ...]:
        slots = slots_of(discovery.hosts) if discovery else plan.slots
        return (Host(plan.job.environment["HOROVOD_HOSTNAME"], slots),)

    try:
        if plan.discovery_script:
            check = partial(slots_here, names=names_of_this_machine())
            discovery = Discovery.by_script(plan.discovery_script, plan.slots_per_host, check)
        job = LocalElasticJob(plan, hosts, display)
        outcome = asyncio.run(job.run())
        job.report(outcome)
    finally:
        display.close()
        if discovery:
            discovery.stop()
    return outcome.exit_code(FAILED)
