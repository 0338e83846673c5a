"""The hosts available to an elastic job: those offered, without those that disconnected."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from lockstep.errors import ConfigError
from lockstep.files.output import say
from lockstep.launch.plan.hosts import Host, first_slots, slots_of
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import NO_MESSAGE


def choose(hosts: Sequence[Host], lost: Collection[str], most: int, present: Sequence[str] = ()) -> tuple[Host, ...]:
    """Return up to `most` slots of the hosts that are not lost; hosts in `present`, already in use, come first."""
    there = [host for host in hosts if host.slots and host.name not in lost]
    rank = {name: number for number, name in enumerate(present)}
    there.sort(key=lambda host: rank.get(host.name, len(rank)))
    return first_slots(there, min(most, slots_of(there))) if there else ()


class Membership:
    """The hosts of an elastic job over time.

    Args:
        offered: Return all hosts that the job may use now, in the order of ranks.
        plan_on: Return the plan for some hosts.
        most: The maximum number of workers.
    """

    def __init__(
        self,
        offered: Callable[[], Sequence[Host]],
        plan_on: Callable[[Sequence[Host]], JobPlan],
        most: int,
        timings: Timings,
    ) -> None:
        self._offered = offered
        self._plan_on = plan_on
        self._most = most
        self._timings = timings
        self._lost: dict[str, float] = {}  # each host, with the time of its next probe
        self._warning = ""

    def lose(self, hosts: Sequence[str], in_trouble: bool) -> None:
        """Mark hosts as lost or, with `in_trouble`, as unable to start their part."""
        due = time.monotonic() + (self._timings.trouble if in_trouble else 0.0)
        self._lost |= dict.fromkeys(hosts, due)

    def slots(self, present: Sequence[str]) -> tuple[Host, ...]:
        """Return the slots to use now."""
        return choose(self._offered(), self._lost, self._most, present)

    def plan(self, hosts: Sequence[Host]) -> JobPlan | None:
        """Return the plan for these hosts; None if it is impossible, with a warning the first time."""
        try:
            plan = self._plan_on(hosts)
        except ConfigError as error:
            if str(error) != self._warning:
                say(f"lockstep: {error}; keeping the previous hosts")
            self._warning = str(error)
            return None
        return plan

    async def probe(self, seconds: float | None = None) -> None:
        """Probe the lost hosts; each has `seconds` to answer, or the default time."""
        offered = {host.name: host for host in self._offered() if host.slots}
        due = [offered[name] for name, when in self._lost.items() if when <= time.monotonic() and name in offered]
        back = await asyncio.gather(*(self._is_back(host, seconds or self._timings.probe) for host in due))
        for host, is_back in zip(due, back, strict=True):
            self._lost[host.name] = time.monotonic() + self._timings.probe_every
            if is_back:
                del self._lost[host.name]

    async def _is_back(self, host: Host, seconds: float) -> bool:
        """Whether Lockstep can be started on a host: its node process exits immediately without a message."""
        plan = self.plan([host])
        return plan is not None and await _code_without_messages(plan.nodes[0].start, seconds) == NO_MESSAGE


async def _code_without_messages(start: Sequence[str], seconds: float) -> int | None:
    """Return the exit code of a host's node process that gets no message, or None if it does not exit in time."""
    process = await asyncio.create_subprocess_exec(
        *start,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin
    with suppress(OSError):
        process.stdin.close()
    try:
        return await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
