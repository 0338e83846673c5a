"""Explain a job that hangs: ask all hosts for their workers' states once no host has made progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from lockstep.diagnosis.board import TRAINER, is_judged
from lockstep.diagnosis.explanation import Explanation, explain
from lockstep.diagnosis.idle_clock import TICK_SECONDS
from lockstep.diagnosis.inspection import WorkerState
from lockstep.errors import HangError
from lockstep.files.output import say
from lockstep.launch.controller.job_outcome import Failure
from lockstep.launch.controller.remote_node import Remote
from lockstep.launch.protocol.messages import Inspected

INSPECTIONS = 2  # of a host, before only the boards of its workers count


class HangWatch:
    """Waits until all hosts stand still, and then explains it.

    Args:
        ends: Whether to end other programs than Lockstep's training, too.
        host_of: The host of a rank; "" in a job on one host.
        settle: Seconds in which a host that moves again reports that.
    """

    def __init__(
        self, remotes: Sequence[Remote], ends: bool, host_of: Callable[[int], str], settle: float = 2 * TICK_SECONDS
    ) -> None:
        self._remotes = remotes
        self._ends = ends
        self._host_of = host_of
        self._settle = settle
        self.hangs: list[Explanation] = []  # that were reported

    async def run(self) -> Failure:
        """Report each hang; of the first one that must end the job, return the failure of the responsible rank."""
        while True:
            for remote in self._remotes:
                await _first(remote.no_progress.wait(), asyncio.shield(remote.end))
            if self._stands_still() and (hang := await self._explain()):
                return hang
            await _first(*(remote.progressing.wait() for remote in self._remotes))

    def _stands_still(self) -> bool:
        """Whether no host makes progress; one whose workers have all exited makes none."""
        return all(remote.no_progress.is_set() or remote.end.done() for remote in self._remotes)

    async def _explain(self) -> Failure | None:
        running = [remote for remote in self._remotes if not remote.end.done()]
        if not any(is_judged(state.flags) for remote in running for state in remote.glance):
            return None
        idle_s = min(remote.idle_s for remote in running)
        inspections = await asyncio.gather(*map(_inspect, running))
        await asyncio.sleep(self._settle)  # an inspection takes seconds, in which a host may have moved
        if not self._stands_still():
            return None
        left = [
            WorkerState(rank, exit_code=0)
            for remote in self._remotes
            if remote.end.done()
            for rank in remote.left.finished
        ]
        states = sorted((*left, *(s for found in inspections for s in found.workers)), key=lambda state: state.rank)
        if any(state.is_debugged for state in states) or not any(state.pid for state in states):
            return None
        explanation = explain(states, idle_s, self._host_of)
        self.hangs.append(explanation)
        is_training = any(state.flags & TRAINER for state in states)
        have_left = all(state.exit_code == 0 for state in states if state.rank in explanation.culprits)
        ends = explanation.ends_training or have_left or (self._ends and not is_training)
        notes = [] if ends else ["the job continues to wait; --hang-timeout SECONDS would end it"]
        for remote, found in zip(running, inspections, strict=True):
            if found.error:
                notes.append(f"{remote.node.host}: {found.error}: the stacks of its workers are unknown")
        for line in explanation.printed(*notes):
            say(line)
        culprit = explanation.culprits[0]
        return Failure(culprit, self._host_of(culprit), HangError.exit_code, hung=True) if ends else None


async def _inspect(remote: Remote) -> Inspected:
    """Inspect a host's workers; return what their boards showed, and the error, if that fails again and again."""
    for _ in range(INSPECTIONS):
        found = await remote.inspect()
        if not found.error:
            return found
    return Inspected(remote.glance, f"{INSPECTIONS} inspections failed ({found.error})")


async def inspect_all(remotes: Sequence[Remote]) -> list[WorkerState]:
    """Return the states of the workers of some hosts, by rank; without those of a host that does not answer in time."""
    answers = await asyncio.gather(*(remote.inspect() for remote in remotes))
    return sorted((state for answer in answers for state in answer.workers), key=lambda state: state.rank)


async def _first(*works: Awaitable[object]) -> None:
    """Wait for the first of several."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
