"""This worker's rank, device and process group, and the rendezvous with its peers.

Start with `world`. `launcher_environment` reads the rank info that a launcher set; `rank0_address`, `interfaces` and
`rendezvous` connect the workers, and `generations` lets them stay when others are lost or added. `slurm_hostlist`
parses Slurm's host lists, and `batch_job` finds the remaining time of the batch job and its restarts. `devices` chooses
among the devices that `accelerator` finds, which hides the differences between kinds of devices; `step_clock` times the
phases of steps on them. `host_memory` keeps freed memory for a CPU's next step, and copies tensors to the host.
`peer_loss` detects within milliseconds that a worker died, and ends a worker whose GPU waits for it, or aborts what
waits, if the worker stays. `autoload` is what `import torch` calls, and `observer` counts and times any program's
steps. Imports diagnosis, config, files and errors, and torch only when a function needs it.
"""

import enum

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Variables of Lockstep's launcher.
STARTED = "LOCKSTEP_STARTED"  # the Unix time at which it started the job
LOSS = "LOCKSTEP_LOSS"  # after a failure: when and how the previous generation of the workers failed
SNAPSHOTS = "LOCKSTEP_SNAPSHOTS"  # if workers may be restarted: the folder that outlives them
COMMIT = "commit"  # a file in it: the last commit of a worker that could not stay (`hvd.elastic`)
NODE_PROCESS = "LOCKSTEP_NODE_PROCESS"  # the same; how a worker that can stay reaches it (`generations`)


class MemberState(enum.IntEnum):
    """A worker's part in its generation; `lockstep.world.generations` has a diagram."""

    ENDS = 0
    STAYS = 1
    CUT_OFF = 2
    LEAVES = 3
    WAITS = 4
