"""The launcher: runs one generation of a job's workers on all its hosts, until the last process has exited.

It communicates with one node process per host (`lockstep.launch.controller.remote_node`). It does not import torch.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from lockstep.config.run_paths import typed_command
from lockstep.config.values import NOTICE
from lockstep.diagnosis.explanation import Explanation, grouped, ranks_text
from lockstep.diagnosis.inspection import WorkerState
from lockstep.files.output import say
from lockstep.launch.controller.hang_watch import HangWatch, inspect_all
from lockstep.launch.controller.job_outcome import (
    STOPPED,
    Failure,
    JobEnd,
    JobOutcome,
    early_exit,
    failures_on,
    first,
    with_unreported,
)
from lockstep.launch.controller.job_signals import JobSignals
from lockstep.launch.controller.job_start import JobStart
from lockstep.launch.controller.remote_node import Lost, NodePool, Remote
from lockstep.launch.controller.stack_server import serving
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.node.processes import allow_many_files
from lockstep.launch.output import Display, Screen
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.protocol.messages import (
    End,
    Ended,
    Failing,
    HostsChanged,
    Leave,
    NodeReady,
    Signal,
    Started,
    StepsObserved,
)
from lockstep.observe.job_steps import JobSteps

OBEYED = tuple(code for number in (signal.SIGTERM, signal.SIGINT) for code in (-number, 128 + number))


class JobRun:
    """One generation of a job's workers on all hosts.

    Attributes:
        signals: Those that the launcher has received.
        failed_at: The Unix time of the first failure.
    """

    def __init__(
        self,
        plan: JobPlan,
        display: Display,
        pool: NodePool,
        steps: JobSteps | None = None,
        notice: signal.Signals | None = None,
        staying: Collection[str] = (),
        end: JobEnd | None = None,
    ) -> None:
        """Prepare to run a plan.

        Args:
            notice: A signal to forward, which came before the workers were started.
            staying: The hosts with workers of an earlier generation, which can already handle such signals.
            end: Receives how the generation ended.
        """
        self.signals = JobSignals(plan, notice, self._forward, lambda: self.has_started and not self._has_ended)
        self.failed_at: float | None = None
        self._plan, self._staying, self._steps = plan, staying, steps
        self._job_end, self._hangs = end or JobEnd(), list[Explanation]()
        self._screen = Screen(display)
        self._pool = pool
        self._remotes: list[Remote] = []
        self._hang: Failure | None = None
        self._left_early = False  # a worker has exited with code 0, and others cannot continue without it
        self._has_ended = False
        self._is_observed = False  # whether the steps that arrive are those of this generation

    @property
    def has_started(self) -> bool:
        """Whether all workers have been started."""
        return bool(self._remotes) and all(remote.answer(Started).done() for remote in self._remotes)

    def tell_of_change(self, change: int) -> None:
        """Report a change of `lockstep.world.generations`, so that workers that can leave between two steps do so."""
        for remote in self._remotes:
            remote.send(HostsChanged(change))

    async def run(
        self, goes_on: Callable[[JobOutcome], bool] = lambda outcome: False, keeps_signals: bool = False
    ) -> JobOutcome:
        """Execute the plan.

        Args:
            goes_on: Whether there will be another generation after this outcome; if so, the node processes and the
                workers that stay are kept.
            keeps_signals: Continue to catch signals after the end, and to record them.
        """
        self.signals.catch()
        allow_many_files()
        self._remotes = await self._pool.take(self._plan.nodes, self._screen.show, self._add_steps, self._plan.others)
        show_due = asyncio.create_task(self._screen.show_due())
        trouble: StartError | None = None
        ended: list[Ended | Lost | None] = []
        keep = False
        try:
            try:
                if await self.signals.unless_given_up(self._start()):
                    ended = await self._follow()
            except StartError as error:
                trouble = error
                ended = await self._leave() if self._plan.is_elastic else []
            outcome = self._judge(ended, trouble)
            keep = goes_on(outcome)
        finally:
            show_due.cancel()
            await self._end(at_once=self.signals.given_up.is_set(), but_ended=keep)
            self._has_ended = True
            await self._pool.give_back(self._remotes, keep)
            if not keeps_signals:
                self.signals.release()
        return outcome

    def report(self, outcome: JobOutcome, is_resized: bool = False) -> None:
        """Show the delayed output, and print how the job ended, unless it `is_resized`."""
        self._screen.release(but=outcome.culprit.rank if outcome.culprit and not is_resized else None)
        self._job_end.add(outcome, self._plan.workers, self._hangs)
        if not is_resized and (message := outcome.message(self._plan.workers)):
            say(message)
            if self._plan.others:
                self._plan.others.report(message)

    def _forward(self, number: signal.Signals) -> None:
        heard = [remote for remote in self._remotes if number in NOTICE and remote.node.host in self._staying]
        for remote in heard or self._remotes:
            remote.send(Signal(int(number)))

    async def _start(self) -> None:
        await JobStart(self._plan, self._remotes, self._pool.copies).run()
        self._is_observed = self._steps is not None
        if self._steps:
            self._steps.begin([self._host_of(rank) for rank in range(self._plan.workers)])
        if self.signals.notice:
            self._forward(self.signals.notice)

    async def _follow(self) -> list[Ended | Lost | None]:
        """Wait until every host's part exits, or one fails; return the outcomes until then, by node."""
        watch = HangWatch(self._remotes, self._plan.ends_hangs, self._host_of)
        self._hangs = watch.hangs
        hanging, leaving = asyncio.create_task(watch.run()), asyncio.create_task(self._wait_for_early_exit())
        try:
            async with serving(self._states, typed_command()):
                return await self._follow_to_the_end(hanging, leaving)
        finally:
            hanging.cancel()
            leaving.cancel()

    async def _wait_for_early_exit(self) -> None:
        """Wait until a worker has exited with code 0 and others cannot continue without it."""
        while not self._left_early:
            await asyncio.sleep(self._plan.timings.look)
            running = [remote.left for remote in self._remotes if not remote.end.done()]
            need = any(left.lost_peer for left in running) or all(left.joining for left in running)
            self._left_early = bool(running) and need and any(remote.left.finished for remote in self._remotes)

    def _add_steps(self, message: StepsObserved) -> None:
        if self._steps and self._is_observed:
            self._steps.add_energy(message.joules, message.unread, message.gpu_use)
            self._steps.add(message.processes, message.oversubscribed)

    async def _states(self) -> list[tuple[str, WorkerState]]:
        """Return the hosts and states of all workers, by rank."""
        return [(self._host_of(state.rank), state) for state in await inspect_all(self._remotes)]

    async def _follow_to_the_end(
        self, hanging: asyncio.Task[Failure], leaving: asyncio.Task[None]
    ) -> list[Ended | Lost | None]:
        ends, failing_answers = zip(*((remote.end, remote.answer(Failing)) for remote in self._remotes), strict=True)
        waiting: set[asyncio.Future[Any]] = {*ends, *failing_answers, hanging, leaving}
        while not all(end.done() for end in ends):
            if not await self.signals.unless_given_up(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)):
                if self.signals.are_late:
                    await self._show_late_workers()
                break
            if hanging.done():
                self._hang, self.failed_at = hanging.result(), time.time()
                break
            bad = any(end.done() and _is_bad(end.result()) for end in ends)
            failing = bad or self._left_early or any(remote.answer(Failing).done() for remote in self._remotes)
            if failing and self.failed_at is None:
                self.failed_at = time.time()
            if failing and not self.signals.stop:  # otherwise every worker has --stop-timeout
                await self.signals.unless_given_up(self._end_the_others())
                break
            waiting = {each for each in waiting if not each.done()}
        return [remote.outcome() for remote in self._remotes]

    async def _show_late_workers(self) -> None:
        """Print what the workers are doing that did not stop, before they are killed."""
        for group in grouped([state for _, state in await self._states() if state.pid]):
            say(f"lockstep: {ranks_text(group.ranks)}: {group.doing}")

    async def _end_the_others(self) -> None:
        """After a failure, wait briefly for related failures, end the other hosts' parts, and wait for the reports."""
        timings = self._plan.timings
        if self._plan.is_elastic:
            await self._leave()
            return
        await asyncio.wait([remote.end for remote in self._remotes], timeout=timings.settle)
        failing = [remote for remote in self._remotes if remote.answer(Failing).done()]
        for remote in self._remotes:
            if remote not in failing:
                remote.send(End(timings.host_end))
        if failing:
            await asyncio.wait([remote.end for remote in failing], timeout=timings.job_end)

    async def _leave(self) -> list[Ended | Lost | None]:
        """End this generation, but not the workers that can continue in another one; return what is known of it."""
        timings = self._plan.timings
        for remote in self._remotes:
            remote.send(Leave())
        ends = [remote.end for remote in self._remotes if remote.answer(NodeReady).done()]
        if ends:
            await self.signals.unless_given_up(asyncio.wait(ends, timeout=timings.leave + timings.job_end))
        return [remote.outcome() for remote in self._remotes]

    async def _end(self, at_once: bool, but_ended: bool) -> None:
        """End every host's part: with SIGTERM, unless `at_once`, and then SIGKILL.

        Args:
            but_ended: Leave the hosts alone whose part has exited, and on which workers may wait.
        """
        timings = self._plan.timings
        remotes = [remote for remote in self._remotes if not (but_ended and remote.end.done())]
        for remote in remotes:
            remote.send(End(0.0 if at_once else timings.host_end))
        ends = [remote.end for remote in remotes if remote.answer(NodeReady).done()]
        if ends:
            await asyncio.wait(ends, timeout=timings.forced_end + (0.0 if at_once else timings.job_end))

    def _judge(self, ended: Sequence[Ended | Lost | None], trouble: StartError | None) -> JobOutcome:
        """Return how this generation ended, from the reports of its hosts."""
        # `ended` is empty if the job was given up before it started.
        pairs = list(zip(self._remotes, ended, strict=False))
        stay = [(remote, end) for remote, end in pairs if isinstance(end, Ended) and end.staying]
        stay = stay or [(remote, end) for remote, end in pairs if isinstance(end, Ended) and end.has_commit]
        outcome, stop = self._judge_failures(pairs, trouble), self.signals.stop
        if stay and not outcome.code:  # the work is not done
            outcome = replace(outcome, code=128 + stop if stop else 1)
        return replace(
            outcome,
            staying={remote.node.host: end.staying for remote, end in stay},
            must_lead=any(isinstance(end, Ended) and end.must_lead for end in ended),
        )

    def _judge_failures(
        self, pairs: Sequence[tuple[Remote, Ended | Lost | None]], trouble: StartError | None
    ) -> JobOutcome:
        if trouble:
            return JobOutcome(trouble.exit_code, trouble=trouble, request=self.signals.request, away=trouble.hosts)
        ended, stop = [end for _, end in pairs], self.signals.stop
        is_local = self._plan.is_local
        parts = (failures_on(remote.node.host, end, self._screen, is_local) for remote, end in pairs)
        failures = [failure for part in parts for failure in part]
        culprit = first(with_unreported(failures, self._screen, self._host_of)) if failures else None
        has_waited = self._left_early or any(isinstance(end, Ended) and end.staying for end in ended)
        finished = [rank for remote in self._remotes for rank in remote.left.finished]
        if finished and not stop and (culprit.is_consequence if culprit else has_waited):
            culprit = early_exit(finished[0], self._host_of(finished[0]), self._screen.log_of(finished[0]), culprit)
        if self._hang and not stop:
            culprit = self._hang
        given_up = self.signals.given_up.is_set()
        obeyed = culprit is not None and culprit.code in OBEYED
        if stop and (given_up or obeyed):
            return JobOutcome(128 + stop, request=stop, killed=self.signals.killed if given_up else "")
        if culprit is None or culprit.exit_code == STOPPED:
            apart = len(ended) == len(self._remotes) and all(isinstance(end, Ended) and end.apart for end in ended)
            if culprit is None:
                return JobOutcome(0, apart=apart and self._plan.workers > 1)
            return JobOutcome(STOPPED, request=self.signals.request, stop_message=culprit.text)
        away = tuple(remote.node.host for remote, end in pairs if isinstance(end, Lost))
        return JobOutcome(culprit.exit_code, culprit, request=self.signals.request, away=away)

    def _host_of(self, rank: int) -> str:
        if self._plan.is_local:
            return ""
        for node in self._plan.nodes:
            rank -= node.workers
            if rank < 0:
                break
        return node.host


def _is_bad(ended: Ended | Lost) -> bool:
    return isinstance(ended, Lost) or bool(ended.error or ended.failures)
