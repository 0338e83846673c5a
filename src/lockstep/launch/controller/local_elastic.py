"""An elastic job on this machine: its workers are processes that this one starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from lockstep.launch.controller.discovery import Discovery, discover
from lockstep.launch.controller.elastic_driver import POLL_SECONDS, Driver, HostSlot, JobFailedError
from lockstep.launch.controller.signals import ignore_stopping, on_stopping
from lockstep.launch.node.descendants import kill_descendants
from lockstep.launch.node.worker_starter import Child, WorkerStarter, signal_group, start
from lockstep.launch.output.display import OutputPlan, say
from lockstep.launch.output.local_output import LocalOutput, Stream
from lockstep.launch.plan.horovodrun_plan import ElasticPlan
from lockstep.launch.plan.hosts import Host, names_of_this_machine, slots_here, slots_of
from lockstep.launch.plan.job_plan import handed_on

FAILED = 1


class StopRequestedError(Exception):
    """A signal to the launcher."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


class SlotProcess:
    """A worker's process, and the streams of its output."""

    def __init__(self, child: Child, streams: tuple[Stream, Stream]) -> None:
        self._child = child
        self._streams = streams

    def poll(self) -> str | None:
        code = self._child.poll()
        if not code:
            return None if code is None else ""
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"

    def end(self, number: signal.Signals) -> None:
        signal_group(self._child, number)

    def take_rank(self, rank: int) -> None:
        for stream in self._streams:
            stream.rank = rank


class LocalStarter:
    """Starts the workers of a plan."""

    def __init__(self, plan: ElasticPlan, output: LocalOutput) -> None:
        self._command = plan.job.command
        self._output = output
        self._environment = {**handed_on(os.environ), **plan.job.environment}
        self._starter = WorkerStarter()
        self._starter.prepare(self._command, self._environment)

    def wait(self) -> None:
        """Wait until workers can be started."""
        self._starter.wait()
        if self._starter.obstacle:
            say(f"lockstep: each worker starts by itself: {self._starter.obstacle}")

    def start(self, slot: HostSlot, variables: Mapping[str, str]) -> SlotProcess:
        variables = {**self._environment, **variables}
        streams = self._output.open(slot.number, "stdout"), self._output.open(slot.number, "stderr")
        assert streams[0].writer is not None
        assert streams[1].writer is not None
        writers = streams[0].writer, streams[1].writer
        forked = self._starter.fork([variables], os.getcwd(), "none", [writers])
        child = forked[0] if forked else start(self._command, variables, "none", writers)
        for stream in streams:
            stream.release()
        return SlotProcess(child, streams)

    def close(self) -> None:
        self._starter.close()


def run_elastic(plan: ElasticPlan, output_plan: OutputPlan) -> int:
    """Carry out a plan and wait for its end.

    Returns:
        0 when workers have finished and none failed after that, 1 when the job failed, 128 + N after signal N.

    Raises:
        ConfigError: The discovery script fails at its first call.
    """
    on_stopping(_stop)
    try:
        with LocalOutput(output_plan) as output:
            _run(plan, output)
    except JobFailedError as error:
        say(f"lockstep: {error}; all workers have ended")
        return FAILED
    except StopRequestedError as error:
        say(f"\nlockstep: stopped by {error.signal.name}; all workers have ended")
        return 128 + error.signal
    return 0


def _run(plan: ElasticPlan, output: LocalOutput) -> None:
    discovery = None
    if plan.discovery_script:
        ask = partial(discover, plan.discovery_script, plan.slots_per_host)
        discovery = Discovery(ask, partial(slots_here, names=names_of_this_machine()))

    def hosts() -> tuple[Host, ...]:
        slots = slots_of(discovery.hosts) if discovery else plan.slots
        return (Host(plan.job.environment["HOROVOD_HOSTNAME"], slots),)

    starter = LocalStarter(plan, output)
    driver = Driver(plan, hosts, starter.start)
    try:
        starter.wait()
        while not driver.step():
            time.sleep(POLL_SECONDS)
    finally:
        ignore_stopping()
        if discovery:
            discovery.stop()
        starter.close()
        driver.end()
        kill_descendants()


def _stop(number: int, frame: Any) -> None:
    raise StopRequestedError(number)
