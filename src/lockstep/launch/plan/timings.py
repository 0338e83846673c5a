"""All time limits of a job's parts. They are in one place because they depend on each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

# In each row, every time is longer than the one before it.
ORDERS = (
    ("heartbeat", "standstill", "silence"),
    ("settle", "worker_end", "host_end", "job_end", "caller_end"),
    ("worker_end", "output"),
    ("error_send", "host_end"),
    ("reconnect", "connect", "load"),
    ("look", "settled"),
    ("first_probe", "probe", "trouble"),
)


@dataclass(frozen=True)
class Timings:
    """The times of a job, all in seconds.

    Args:
        heartbeat: Interval of heartbeats.
        standstill: A pause of this process itself, during which it could not receive heartbeats.
        silence: Without a heartbeat for this time, the other side is considered dead. TCP doubles its retransmission
            timeout: data sent just before a cut of 5 s is sent again 0.2, 0.6, 1.4, 3 and 6.3 s later, so a job
            survives the cut only if this is longer than 7 s.
        connect: Limit for one attempt to connect to another host and to identify it.
        reconnect: Interval of these attempts.
        load: Limit for importing Python's modules, which is slow on a busy file system.
        settle: Time for related failures to be reported.
        leave: From a failure until a worker that stays must wait for the next generation, or is killed. Longer than
            `lockstep.world.peer_loss` takes to notice a lost host, the wait for a device, and a step.
        blocked: From a failure until workers that have not left are inspected. One that holds the GIL is killed: it
            notices no failure, and may wait for a lost worker.
        worker_end: From SIGTERM to SIGKILL of a worker.
        host_end: The same if the launcher ends the workers of a host, or disconnects.
        job_end: How long the launcher waits for the hosts to report that their workers have exited.
        forced_end: Limit for processes to exit after SIGKILL.
        caller_end: How long a program that called the launcher waits for it to exit.
        output: Limit for reading the output of processes that cannot be ended.
        error_send: Limit for sending an error to a launcher that may not read it.
        close: Limit for a peer to read the last messages, or for a node process to exit once its stdin is closed.
        store_look: Interval of checks of the process that serves the store.
        look: Interval of checks of the hosts of a job with restarts.
        settled: Time between the workers' start and a change of their number.
        probe_every: Interval of probes of a dead host.
        probe: Limit for a probe: ssh and the start of Python from a busy file system.
        first_probe: Limit for the first probe after a failure, while the other hosts wait.
        trouble: Time before a host that failed to start its part is tried again.

    Raises:
        ValueError: A time is not longer than one that it must exceed, or is not positive.
    """

    heartbeat: float = 0.5
    standstill: float = 3.0
    silence: float = 9.0
    connect: float = 5.0
    reconnect: float = 0.2
    load: float = 600.0
    settle: float = 0.5
    leave: float = 120.0
    blocked: float = 3.0
    worker_end: float = 3.0
    host_end: float = 5.0
    job_end: float = 6.0
    forced_end: float = 2.0
    caller_end: float = 20.0
    output: float = 5.0
    error_send: float = 1.0
    close: float = 2.0
    store_look: float = 1.0
    look: float = 1.0
    settled: float = 2.0
    probe_every: float = 15.0
    probe: float = 20.0
    first_probe: float = 3.0
    trouble: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ValueError(f"{each.name} must be positive")
        for names in ORDERS:
            for shorter, longer in pairwise(names):
                if getattr(self, shorter) >= getattr(self, longer):
                    raise ValueError(f"{shorter} ({getattr(self, shorter):g} s) must be shorter than {longer}")
        if self.caller_end <= self.job_end + self.forced_end + 2 * self.close:
            raise ValueError("caller_end must be longer than the launcher takes to end its workers")
