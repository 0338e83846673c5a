"""The start of one generation of the workers on all hosts, and the preparation of spare hosts."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from lockstep.config.run_paths import COMMAND, typed_command
from lockstep.files.output import say
from lockstep.launch.controller.image_packages import copy_packages
from lockstep.launch.controller.remote_node import STAGES, NodePool, Remote
from lockstep.launch.controller.start_errors import StartError, disagreement, gather_answers, too_late
from lockstep.launch.output import Name
from lockstep.launch.plan.job_plan import JobPlan, NodePlan, crowding
from lockstep.launch.protocol.messages import Message, NodeJob, NodeReady, Reach, Reached, Start, Started
from lockstep.launch.staging.job_copies import JobCopies
from lockstep.launch.staging.stage_options import staged_variable
from lockstep.world.interfaces import LOOPBACK

M = TypeVar("M", bound=Message)


async def prepare_spare(plan: JobPlan, pool: NodePool) -> None:
    """Let the hosts import what the workers need, but start no worker: they are spares of another job.

    Raises:
        StartError: A host cannot be reached.
    """

    async def show(rank: int, name: Name, text: bytes) -> None:
        raise AssertionError("no worker runs")

    remotes = await pool.take(plan.nodes, show, others=plan.others)
    pool.hold(remotes)  # at once: if this is cancelled, the pool ends them
    await JobStart(plan, remotes, pool.copies).prepare()


class JobStart:
    """Starts the workers of one generation.

    Args:
        remotes: The hosts' node processes, in the order of the plan.
    """

    def __init__(self, plan: JobPlan, remotes: Sequence[Remote], copies: JobCopies) -> None:
        self._plan = plan
        self._remotes = remotes
        self._copies = copies

    async def prepare(self) -> None:
        """Let the hosts import what the workers need."""
        await self._copies.bring(self._plan, [remote.node for remote in self._remotes])
        async with asyncio.timeout(self._plan.start_timeout):
            await self._ready()

    async def _ready(self) -> list[NodeReady]:
        """Start the node processes that do not run yet, send them the job, and return their answers."""
        secret = secrets.token_hex(16)
        starts = [remote.start(self._first_message(remote, secret)) for remote in self._remotes]
        await gather_answers(starts, self._plan.timings.settle)
        return await self._answers(NodeReady, self._remotes)

    async def run(self) -> None:
        """Start the workers on all hosts.

        Raises:
            StartError: A host failed to start its part; the message names the host and the fix.
        """
        try:
            started = await self._run()
        except StartError as error:
            error.hosts = error.hosts or self._not_started()
            raise
        for remote, answer in zip(self._remotes, started, strict=True):
            if answer.note:
                where = "" if self._plan.is_local else f"{remote.node.host}: "
                say(f"lockstep: {where}each worker starts its own interpreter: {answer.note}")

    async def _run(self) -> Sequence[Started]:
        plan = self._plan
        if plan.container:
            await asyncio.to_thread(copy_packages, Path(plan.container.packages))
        await self._copies.bring(plan, [remote.node for remote in self._remotes])
        await self._connect()
        limit = max(plan.timings.load, plan.start_timeout)
        try:
            async with asyncio.timeout(limit):
                return await self._answers(Started, self._remotes)
        except TimeoutError:
            raise StartError(too_late(self._late_nodes(), "import torch", limit)) from None

    async def _connect(self) -> None:
        """Wait until all hosts are ready, and let them start the workers."""
        plan = self._plan
        try:
            async with asyncio.timeout(plan.start_timeout):
                here = await self._ready()
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

    def _not_started(self) -> tuple[str, ...]:
        """Return the hosts that prevented the start: those that failed or, if none did, those that are late."""
        troubled = tuple(remote.node.host for remote in self._remotes if remote.is_in_trouble)
        return troubled or tuple(node.host for node in self._late_nodes())

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
        plan, node, copies = self._plan, remote.node, self._copies.by_path
        is_direct = plan.direct_stdout and plan.is_local and not node.in_container
        has_own_command = plan.others is not None and not plan.others.obey and node.is_relayed
        return NodeJob(
            node=remote.index,
            slots=tuple(each.workers for each in plan.nodes),
            host=node.host,
            command=() if has_own_command else self._copies.in_command(plan),
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
            stdout=0 if plan.terminal else sys.stdout.fileno() if is_direct else -1,
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

    async def _answers(self, kind: type[M], remotes: Sequence[Remote]) -> list[M]:
        """Wait for the message of this kind from some hosts."""
        return await gather_answers([remote.answer(kind) for remote in remotes], self._plan.timings.settle)
