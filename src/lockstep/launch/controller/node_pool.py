"""The node processes of a launcher, which stay on their hosts from one start of the workers to the next.

What they have loaded beforehand, and the way to them, need not be got anew.
"""

from __future__ import annotations

import asyncio

from lockstep.launch.controller.remote_node import Remote, Show
from lockstep.launch.plan.job_plan import NodePlan

LOOK_SECONDS = 0.01


class NodePool:
    """Those that no job has at the moment, by how they were started."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, ...], Remote] = {}
        self._lost: list[Remote] = []

    async def look(self) -> None:
        """Notice which of them have ended meanwhile."""
        if self._free:
            await asyncio.sleep(LOOK_SECONDS)

    def take(self, index: int, node: NodePlan, show: Show) -> Remote:
        """A host's node process; a new one, not started yet, where none is there that can be used again."""
        remote = self._free.pop(node.start, None) or Remote()
        if remote.is_lost:
            self._lost.append(remote)
            remote = Remote()
        remote.take(index, node, show)
        return remote

    async def give_back(self, remotes: list[Remote], keep: bool) -> None:
        """Take them back from a job; those that are not kept, or have been lost, end."""
        kept = {remote.node.start: remote for remote in remotes if keep and remote.is_free}
        await asyncio.gather(*(remote.close() for remote in remotes if remote.node.start not in kept))
        self._free |= kept

    async def close(self) -> None:
        """End all."""
        remotes, self._free, self._lost = [*self._free.values(), *self._lost], {}, []
        await asyncio.gather(*(remote.close() for remote in remotes))
