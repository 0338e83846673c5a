"""A node's part of a job, for tests of messages and of what receives them."""

from __future__ import annotations

from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import NodeJob

JOB = NodeJob(
    node=0,
    slots=(1,),
    host="here",
    command=("true",),
    added=(),
    environment={},
    folder="/",
    bind="none",
    secret="",
    heartbeat=False,
    stdout=-1,
    terminal=False,
    interfaces=(),
    address="",
    loopback=True,
    snapshots="",
    newcomer=False,
    generation=0,
    loss="",
    max_restarts=0,
    hang_timeout=300.0,
    timings=Timings(close=0.1),
)
