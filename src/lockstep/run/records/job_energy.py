"""The energy that a job uses between its records, over all hosts."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from lockstep.energy.counters import Found, find_counters
from lockstep.energy.meter import EnergyMeter
from lockstep.world import accelerator
from lockstep.world.world import World


class JobEnergy:
    """Counts the hosts of a job, and the GPUs that its workers use: one worker reads each counter. Collective.

    Attributes:
        is_counted: Whether any worker has a counter to read.
    """

    def __init__(self, world: World, find: Callable[..., Found] = find_counters, host: str = "") -> None:
        counters, unread = find([accelerator.pci_address(world.device)] if world.device.type != "cpu" else [])
        host = host or socket.gethostname()
        names = world.gather([f"{host} {counter.name}" for counter in counters])
        # Not only the worker with local rank 0, which may have been lost.
        earlier = {name for worker in names[: world.rank] for name in worker}
        self._meter = EnergyMeter(([each for each in counters if f"{host} {each.name}" not in earlier], unread))
        self._world, self.is_counted, self._is_asked = world, any(names), False
        self.close = self._meter.close

    def take(self) -> tuple[dict[str, float], list[str]]:
        """Return the joules of each kind since the last call, and what is not counted, on any host, if that is new."""
        if self._is_asked and not self.is_counted:
            return {}, []
        self._is_asked = True
        workers = self._world.gather([self._meter.take(), self._meter.take_unread()])
        sums = Counter[str]()
        for joules, _ in workers:
            sums.update(joules)
        return dict(sums), list(dict.fromkeys(line for _, unread in workers for line in unread))
