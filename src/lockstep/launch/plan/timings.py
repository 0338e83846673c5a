"""How long the parts of a job wait for each other: in one place, for each time makes sense only beside the others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

# What has to be over before what: each of these takes longer than the one before it.
ORDERS = (
    ("heartbeat", "standstill", "silence"),
    ("settle", "worker_end", "host_end", "job_end", "caller_end"),
    ("worker_end", "output"),
    ("last_word", "host_end"),
    ("reconnect", "connect", "load"),
    ("look", "settled"),
    ("first_probe", "probe", "trouble"),
)


@dataclass(frozen=True)
class Timings:
    """The times of a job, all in seconds.

    Args:
        heartbeat: Between two signs of life.
        standstill: A pause of the process itself, in which it could hear nobody.
        silence: After which the other side is given up. TCP doubles its waits: what was sent just before a cut of 5 s
            is sent again 0.2, 0.6, 1.4, 3 and 6.3 s later, so that a job outlives the cut only if 7 s are not too much.
        connect: For one attempt to connect to another host, and to recognize it.
        reconnect: Between two attempts.
        load: For the import of Python's modules, which a busy file system makes slow.
        by_hand: What the launcher waits longer than its node process for other nodes that are started by hand: that one
            knows more of why they did not come.
        settle: In which failures that belong together become known.
        worker_end: A worker's, from SIGTERM to SIGKILL.
        elastic_end: The same where an elastic job ends whose driver ends the workers itself (Ray, Spark).
        host_end: For the end of one host's workers, as another part of the launcher counts it.
        job_end: For the end of all hosts' parts.
        forced_end: For what is ended by SIGKILL.
        caller_end: For a launcher's end, as the program that has called it counts it.
        output: In which the output of processes that cannot be ended must have been read.
        last_word: For an error's way to a launcher that may not read it.
        close: For the other side of a connection to read what was sent last, or for a process to notice its end.
        store_look: Between two looks at the process that serves the store.
        look: Between two looks at the hosts of a job that may be started anew.
        settled: Between the workers' start and a change of their number.
        probe_every: Between two questions to a lost host.
        probe: For its answer: ssh and a Python that comes from a busy file system.
        first_probe: For its answer right after the loss, when the others wait for it.
        trouble: Before a host is asked again that could not start its part.

    Raises:
        ValueError: One that has to be over before another would take as long, or a time is not positive.
    """

    heartbeat: float = 0.5
    standstill: float = 3.0
    silence: float = 9.0
    connect: float = 5.0
    reconnect: float = 0.2
    load: float = 600.0
    by_hand: float = 5.0
    settle: float = 0.5
    worker_end: float = 3.0
    elastic_end: float = 5.0
    host_end: float = 5.0
    job_end: float = 6.0
    forced_end: float = 2.0
    caller_end: float = 20.0
    output: float = 5.0
    last_word: float = 1.0
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
            raise ValueError("caller_end must be longer than what the launcher needs to end its workers")
