"""The node processes of a launcher, which stay on their hosts between restarts of the workers.

A restart reuses their connections and the modules that they have loaded.
"""

from __future__ import annotations

import asyncio

from lockstep.launch.controller.remote_node import Remote, Show
from lockstep.launch.plan.job_plan import NodePlan

DETECT_SECONDS = 0.01


class NodePool:
    """The node processes that are not in use, by their start command."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, ...], Remote] = {}
        self._lost: list[Remote] = []

    async def detect_exits(self) -> None:
        """Let asyncio detect node processes that have exited, which `take` does not reuse."""
        if self._free:
            await asyncio.sleep(DETECT_SECONDS)

    def take(self, index: int, node: NodePlan, show: Show) -> Remote:
        """Return a host's node process; a new one, not started yet, if none can be reused."""
        remote = self._free.pop(node.start, None) or Remote()
        if remote.is_lost:
            self._lost.append(remote)
            remote = Remote()
        remote.take(index, node, show)
        return remote

    async def give_back(self, remotes: list[Remote], keep: bool) -> None:
        """Take node processes back from a job; end those that are not kept or have disconnected."""
        kept = {remote.node.start: remote for remote in remotes if keep and remote.is_free}
        await asyncio.gather(*(remote.close() for remote in remotes if remote.node.start not in kept))
        self._free |= kept

    async def close(self) -> None:
        """End all node processes."""
        remotes, self._free, self._lost = [*self._free.values(), *self._lost], {}, []
        await asyncio.gather(*(remote.close() for remote in remotes))
