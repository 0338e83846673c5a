"""Explain a job that hangs: ask all hosts for their workers' states once no host has made progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.diagnosis.explanation import Explanation, explain
from lockstep.errors import HangError
from lockstep.launch.controller.failure import Failure
from lockstep.launch.controller.remote_node import Remote
from lockstep.launch.output.display import say

INSPECTION_SECONDS = 10.0


@dataclass(frozen=True)
class Hang:
    """A hang that ends the job."""

    explanation: Explanation
    host: str

    @property
    def failure(self) -> Failure:
        """The failure of the first responsible rank."""
        rank = self.explanation.culprits[0] if self.explanation.culprits else -1
        return Failure(rank, self.host, HangError.exit_code, hung=True)


class HangWatch:
    """Waits until all hosts stand still, and then explains it.

    Args:
        ends: Whether to end any job that hangs, not only those whose workers run Lockstep's own training.
        host_of: The host of a rank; "" in a job on one host.
    """

    def __init__(self, remotes: Sequence[Remote], ends: bool, host_of: Callable[[int], str]) -> None:
        self._remotes = remotes
        self._ends = ends
        self._host_of = host_of

    async def run(self) -> Hang:
        """Report each hang; return the first one that must end the job."""
        while True:
            for remote in self._remotes:
                await remote.standstill.wait()
            if not all(remote.standstill.is_set() for remote in self._remotes):
                continue
            if hang := await self._explain():
                return hang
            await self._until_moving()

    async def _until_moving(self) -> None:
        """Wait until a host makes progress again."""
        waiting = [asyncio.create_task(remote.moving.wait()) for remote in self._remotes]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def _explain(self) -> Hang | None:
        idle_s = min(remote.idle_s for remote in self._remotes)
        answers = await asyncio.gather(*(remote.inspect(INSPECTION_SECONDS) for remote in self._remotes))
        states = sorted((state for answer in answers for state in answer), key=lambda state: state.rank)
        if any(state.is_debugged for state in states) or not any(state.pid for state in states):
            return None
        explanation = explain(states, idle_s, self._host_of)
        ends = self._ends or explanation.ends_training
        head, *more = explanation.lines
        end = "" if ends else "the job continues to wait; --hang-timeout SECONDS would end it"
        for line in (head, *more, *([end] if end else [])):
            say(f"lockstep: {line}")
        for line in explanation.stacks:
            say(line)
        return Hang(explanation, self._host_of(explanation.culprits[0])) if ends else None
