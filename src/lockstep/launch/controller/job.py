"""The launcher: executes a job's plan on all its hosts, until the last process has exited.

It communicates with one node process per host (`lockstep.launch.controller.remote_node`). It does not import torch.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.run_paths import COMMAND, is_training, typed_command
from lockstep.config.values import NOTICE
from lockstep.diagnosis.inspection import WorkerState
from lockstep.files.output import say
from lockstep.launch.controller.hang_watch import HangWatch, inspect_all
from lockstep.launch.controller.image_packages import copy_packages
from lockstep.launch.controller.job_outcome import STOPPED, Failure, JobOutcome, early_exit, failures_on, first
from lockstep.launch.controller.job_steps import JobSteps
from lockstep.launch.controller.remote_node import STAGES, Lost, NodePool, Remote
from lockstep.launch.controller.stack_server import serving
from lockstep.launch.controller.start_errors import StartError, disagreement, gather_answers, too_late
from lockstep.launch.node.processes import allow_many_files
from lockstep.launch.output import Display, Screen
from lockstep.launch.plan.job_plan import JobPlan, NodePlan, crowding
from lockstep.launch.protocol.messages import (
    End,
    Ended,
    Failing,
    HostsChanged,
    Leave,
    Message,
    NodeJob,
    NodeReady,
    Reach,
    Reached,
    Signal,
    Start,
    Started,
    StepsObserved,
)
from lockstep.launch.staging.stage_options import staged_variable
from lockstep.world.interfaces import LOOPBACK

# Forwarded unchanged; the workers decide what to do. SIGURG is the notice in LSF's manual, ignored without a handler.
FORWARDED = (*NOTICE, signal.SIGURG)
# Forwarded as SIGTERM, except SIGINT to `lockstep train`. A second Ctrl-C kills the job; a second SIGTERM does not,
# because batch systems send several.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OBEYED = tuple(code for number in (signal.SIGTERM, signal.SIGINT) for code in (-number, 128 + number))
M = TypeVar("M", bound=Message)


class LaunchedJob:
    """The state of a running job."""

    def __init__(
        self,
        plan: JobPlan,
        display: Display,
        direct_stdout: bool,
        pool: NodePool,
        steps: JobSteps | None = None,
        notice: signal.Signals | None = None,
        staying: Collection[str] = (),
    ) -> None:
        """Prepare to run a plan.

        Args:
            notice: A signal to forward, which came before the workers were started.
            staying: The hosts with workers of an earlier generation, which can already handle such signals.
        """
        self.notice = notice
        self._plan = plan
        self._staying = staying
        self._steps = steps
        self._screen = Screen(display)
        self._direct_stdout = direct_stdout and plan.is_local and not plan.nodes[0].in_container
        self._pool = pool
        self._remotes: list[Remote] = []
        self._stop: signal.Signals | None = None
        self._size = plan.workers
        self._give_up = asyncio.Event()
        self._killed = ""
        self._hang: Failure | None = None
        self._left_early = False  # a worker has exited with code 0, and others cannot continue without it
        self._has_ended = False
        self.failed_at: float | None = None  # the Unix time of the first failure
        self._is_observed = False  # whether the steps that arrive are those of this generation

    @property
    def request(self) -> signal.Signals | None:
        """The signal that asked the launcher to stop the job, also if it came after the job's end."""
        return self._stop or self.notice

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
            keeps_signals: Continue to catch signals after the end, and to record them in `request`.
        """
        self._catch()
        allow_many_files()
        self._remotes = await self._pool.take(self._plan.nodes, self._screen.show, self._add_steps, self._plan.others)
        show_due = asyncio.create_task(self._screen.show_due())
        trouble: StartError | None = None
        ended: list[Ended | Lost | None] = []
        keep = False
        try:
            try:
                if await self._unless_given_up(self._start()):
                    ended = await self._follow()
            except StartError as error:
                trouble = error
                trouble.hosts = error.hosts or self._not_started()
            if trouble and self._plan.is_elastic:
                ended = await self._leave()
            outcome = self._judge(ended, trouble)
            keep = goes_on(outcome)
        finally:
            show_due.cancel()
            await self._end(at_once=self._give_up.is_set(), but_ended=keep)
            self._has_ended = True
            await self._pool.give_back(self._remotes, keep)
            if not keeps_signals:
                self._release()
        return outcome

    async def prepare(self) -> None:
        """Let the hosts import what the workers need, but start no worker: they are spares of another job.

        Raises:
            StartError: A host cannot be reached.
        """
        remotes = await self._pool.take(self._plan.nodes, self._screen.show, others=self._plan.others)
        self._pool.hold(remotes)  # at once: if this is cancelled, the pool ends them
        await self._pool.copies.bring(self._plan, [remote.node for remote in remotes])
        for remote in remotes:
            await remote.start(self._first_message(remote, secrets.token_hex(16)))
        async with asyncio.timeout(self._plan.start_timeout):
            await self._answers(NodeReady, remotes)

    def report(self, outcome: JobOutcome, is_resized: bool = False) -> None:
        """Show the delayed output, and print how the job ended, unless it `is_resized`."""
        self._screen.release(but=outcome.culprit.rank if outcome.culprit and not is_resized else None)
        if not is_resized and (message := outcome.message(self._size)):
            say(message)
            if self._plan.others:
                self._plan.others.report(message)

    def _catch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (*STOP, *FORWARDED):
            if signal.getsignal(number) != signal.SIG_IGN:  # signals that `nohup` or a shell ignores stay ignored
                loop.add_signal_handler(number, self._on_signal, number)
        if not self._plan.is_local:
            loop.add_signal_handler(signal.SIGTSTP, lambda: None)  # other hosts would consider a silent launcher dead

    def _release(self) -> None:
        """Restore the signals' handlers between two jobs."""
        for number in (*STOP, *FORWARDED, signal.SIGTSTP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        started = self.has_started and not self._has_ended
        if number in FORWARDED:
            self.notice = number
            if started:  # otherwise it is sent after the start
                self._forward(number)
            return
        again, self._stop = self._stop is not None, self._stop or number
        if not started:
            self._give_up.set()
        elif again and number == signal.SIGINT:
            self._kill("all workers were killed on the second Ctrl-C")
        elif not again:
            # In other programs SIGINT is an error, and each worker would print a traceback.
            is_ours = number == signal.SIGINT and is_training(self._plan.command)
            self._forward(signal.SIGINT if is_ours else signal.SIGTERM)
            more = "; press again to kill them" if number == signal.SIGINT else ""
            say(f"\nlockstep: {number.name}: stopping the workers{more}")
            seconds = self._plan.stop_timeout
            why = f"the workers did not stop within --stop-timeout {seconds:g} s and were killed"
            asyncio.get_running_loop().call_later(seconds, self._kill, why)

    def _kill(self, why: str) -> None:
        self._killed = self._killed or why
        self._give_up.set()

    def _forward(self, number: signal.Signals) -> None:
        heard = [remote for remote in self._remotes if number in NOTICE and remote.node.host in self._staying]
        for remote in heard or self._remotes:
            remote.send(Signal(int(number)))

    async def _unless_given_up(self, work: Awaitable[Any]) -> bool:
        """Do the work; return whether it finished before the job was given up."""
        task, given_up = asyncio.ensure_future(work), asyncio.create_task(self._give_up.wait())
        await asyncio.wait({task, given_up}, return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    async def _start(self) -> None:
        """Start the workers on all hosts.

        Raises:
            StartError: A host failed to start its part; the message names the host and the fix.
        """
        plan = self._plan
        if plan.container:
            await asyncio.to_thread(copy_packages, Path(plan.container.packages))
        await self._pool.copies.bring(plan, [remote.node for remote in self._remotes])
        await self._connect()
        try:
            limit = max(plan.timings.load, plan.start_timeout)
            async with asyncio.timeout(limit):
                started = await self._answers(Started)
        except TimeoutError:
            raise StartError(too_late(self._late_nodes(), "import torch", limit)) from None
        for remote, answer in zip(self._remotes, started, strict=True):
            if answer.note:
                where = "" if plan.is_local else f"{remote.node.host}: "
                say(f"lockstep: {where}each worker starts its own interpreter: {answer.note}")
        self._size = started[0].size
        self._is_observed = self._steps is not None
        if self._steps:
            self._steps.begin([self._host_of(rank) for rank in range(self._size)])
        if self.notice:
            self._forward(self.notice)

    async def _connect(self) -> None:
        """Start the node processes that do not run yet, and wait until all have connected."""
        plan = self._plan
        secret = secrets.token_hex(16)
        try:
            async with asyncio.timeout(plan.start_timeout):
                starts = [remote.start(self._first_message(remote, secret)) for remote in self._remotes]
                await gather_answers(starts, plan.timings.settle)
                here = await self._answers(NodeReady)
                if problem := disagreement([node.host for node in plan.nodes], [each.versions for each in here]):
                    raise StartError(problem)
                self._warn_of_crowding(here)
                if len(self._remotes) > 1:
                    await self._start_on_several(here[0].listeners)
                else:
                    self._remotes[0].send(Start(LOOPBACK, 0, LOOPBACK))
        except TimeoutError:
            raise StartError(too_late(self._late_nodes(), "answer", plan.start_timeout)) from None

    def _warn_of_crowding(self, here: Sequence[NodeReady]) -> None:
        """Print, in the first generation, which hosts have fewer cores than workers; a local job's plan has a note."""
        if self._plan.is_local or self._plan.generation:
            return
        for node, answer in zip(self._plan.nodes, here, strict=True):
            if 0 < answer.cores < node.workers:
                say(f"lockstep: {node.host}: {crowding(node.workers, answer.cores)}")

    def _late_nodes(self) -> list[NodePlan]:
        """Return the nodes that have not passed the first stage that is incomplete; the others wait for them."""
        late: list[NodePlan] = []
        for stage in STAGES:
            remotes = self._remotes[1:] if stage is Reached else self._remotes
            late = late or [each.node for each in remotes if not each.answer(stage).done()]
        return late

    async def _start_on_several(self, listeners: dict[str, int]) -> None:
        """Let the other hosts try the first one's listeners, and start all hosts with one that all can reach."""
        leader, *others = self._remotes
        for remote in others:
            remote.send(Reach(listeners))
        ways = [each.ways for each in await self._answers(Reached, others)]
        common = [address for address in listeners if all(address in own for own in ways)]
        if not common:
            cut_off = [remote.node.host for remote, each in zip(others, ways, strict=True) if not each]
            raise StartError(
                f"{', '.join(cut_off) or 'the other hosts'} cannot reach {leader.node.host} at any of its addresses "
                f"({', '.join(listeners)}); is there a firewall between them? --interface names the network to use"
            )
        address = common[0]
        leader.send(Start(address, listeners[address], address))
        for remote, each in zip(others, ways, strict=True):
            remote.send(Start(address, listeners[address], each[address]))

    def _first_message(self, remote: Remote, secret: str) -> NodeJob:
        plan, node, copies = self._plan, remote.node, self._pool.copies.by_path
        has_own_command = plan.others is not None and not plan.others.obey and node.is_relayed
        return NodeJob(
            node=remote.index,
            nodes=len(plan.nodes),
            workers=node.workers,
            slots=tuple(each.workers for each in plan.nodes),
            host=node.host,
            command=() if has_own_command else self._pool.copies.in_command(plan),
            added=plan.added if has_own_command else (),
            environment={
                **node.environment(plan.own_environment),
                **plan.environment,
                **staged_variable(copies),
                COMMAND: typed_command(),
            },
            folder=os.getcwd(),
            bind=plan.bind,
            secret=secret,
            heartbeat=not node.is_here or node.in_container,
            stdout=0 if plan.terminal else sys.stdout.fileno() if self._direct_stdout else -1,
            terminal=plan.terminal,
            interfaces=plan.interfaces,
            address=plan.address if node.is_here else "",
            loopback=plan.is_local,
            snapshots=plan.snapshots,
            newcomer=node.host in plan.newcomers,
            generation=plan.generation,
            loss=plan.loss,
            max_restarts=plan.max_restarts,
            hang_timeout=plan.hang_timeout,
            timings=plan.timings,
        )

    async def _answers(self, kind: type[M], remotes: Sequence[Remote] | None = None) -> list[M]:
        """Wait for the message of this kind from all hosts, or from `remotes`."""
        remotes = self._remotes if remotes is None else remotes
        return await gather_answers([remote.answer(kind) for remote in remotes], self._plan.timings.settle)

    async def _follow(self) -> list[Ended | Lost | None]:
        """Wait until every host's part exits, or one fails; return the outcomes until then, by node."""
        watch = HangWatch(self._remotes, self._plan.ends_hangs, self._host_of)
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
            self._left_early = bool(running) and need and any(remote.finished for remote in self._remotes)

    def _add_steps(self, message: StepsObserved) -> None:
        if self._steps and self._is_observed:
            self._steps.add(message)

    async def _states(self) -> list[tuple[str, WorkerState]]:
        """Return the hosts and states of all workers, by rank."""
        return [(self._host_of(state.rank), state) for state in await inspect_all(self._remotes)]

    async def _follow_to_the_end(
        self, hanging: asyncio.Task[Failure], leaving: asyncio.Task[None]
    ) -> list[Ended | Lost | None]:
        ends, failing_answers = zip(*((remote.end, remote.answer(Failing)) for remote in self._remotes), strict=True)
        waiting: set[asyncio.Future[Any]] = {*ends, *failing_answers, hanging, leaving}
        while not all(end.done() for end in ends):
            if not await self._unless_given_up(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)):
                break
            if hanging.done():
                self._hang, self.failed_at = hanging.result(), time.time()
                break
            bad = any(end.done() and _is_bad(end.result()) for end in ends)
            failing = bad or self._left_early or any(remote.answer(Failing).done() for remote in self._remotes)
            if failing and self.failed_at is None:
                self.failed_at = time.time()
            if failing and not self._stop:  # otherwise every worker has --stop-timeout
                await self._unless_given_up(self._end_the_others())
                break
            waiting = {each for each in waiting if not each.done()}
        return [remote.outcome() for remote in self._remotes]

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
            await self._unless_given_up(asyncio.wait(ends, timeout=timings.leave + timings.job_end))
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
        outcome = self._judge_failures(pairs, trouble)
        if stay and not outcome.code:  # the work is not done
            outcome = replace(outcome, code=128 + self._stop if self._stop else 1)
        return replace(
            outcome,
            staying={remote.node.host: end.staying for remote, end in stay},
            must_lead=any(isinstance(end, Ended) and end.must_lead for end in ended),
        )

    def _judge_failures(
        self, pairs: Sequence[tuple[Remote, Ended | Lost | None]], trouble: StartError | None
    ) -> JobOutcome:
        if trouble:
            return JobOutcome(trouble.exit_code, trouble=trouble, request=self.request, away=trouble.hosts)
        ended = [end for _, end in pairs]
        is_local = self._plan.is_local
        parts = (failures_on(remote.node.host, end, self._screen, is_local) for remote, end in pairs)
        failures = [failure for part in parts for failure in part]
        culprit = first(self._with_unreported(failures)) if failures else None
        has_waited = self._left_early or any(isinstance(end, Ended) and end.staying for end in ended)
        finished = [rank for remote in self._remotes for rank in remote.finished]
        if finished and not self._stop and (culprit.is_consequence if culprit else has_waited):
            culprit = early_exit(finished[0], self._host_of(finished[0]), self._screen.log_of(finished[0]), culprit)
        if self._hang and not self._stop:
            culprit = self._hang
        given_up = self._give_up.is_set()
        obeyed = culprit is not None and culprit.code in OBEYED
        if self._stop and (given_up or obeyed):
            return JobOutcome(128 + self._stop, request=self._stop, killed=self._killed if given_up else "")
        if culprit is None or culprit.exit_code == STOPPED:
            apart = len(ended) == len(self._remotes) and all(isinstance(end, Ended) and end.apart for end in ended)
            if culprit is None:
                return JobOutcome(0, apart=apart and self._size > 1)
            return JobOutcome(STOPPED, request=self.request, stop_message=culprit.text)
        away = tuple(remote.node.host for remote, end in pairs if isinstance(end, Lost))
        return JobOutcome(culprit.exit_code, culprit, request=self.request, away=away)

    def _not_started(self) -> tuple[str, ...]:
        """Return the hosts that prevented the start: those that failed or, if none did, those that are late."""
        troubled = tuple(remote.node.host for remote in self._remotes if remote.is_in_trouble)
        return troubled or tuple(node.host for node in self._late_nodes())

    def _with_unreported(self, failures: list[Failure]) -> list[Failure]:
        """If all failures are consequences, add the workers that printed a traceback but have not exited yet."""
        if not first(failures).is_consequence:
            return failures
        known = {failure.rank for failure in failures}
        unreported = [
            Failure(rank, self._host_of(rank), 1, self._screen.last_lines(rank), self._screen.seen(rank) or 0.0)
            for rank in self._screen.waiting()
            if rank not in known
        ]
        return [*failures, *unreported]

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
