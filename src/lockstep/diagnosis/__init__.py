"""Diagnosis of jobs that hang or are slow: workers publish their progress, and a hang is explained from all ranks.

- `board`: one worker's progress in shared memory. `observed_steps`: what it says of any program's steps.
- `publisher`: a worker's side: its board, its stacks on a signal, its pending collectives on request.
- `idle_clock`: how long workers have made no progress. `loaded_samples`: the samples of a program's loaders.
- `flight_recorder`: the collectives of this process, from torch's own records.
- `torch_hooks`: what a program does with torch.
- `inspection`: everything known about one worker. `explanation`: which rank is responsible for a hang.
- `group_watch`: the same from within the workers, in jobs that another launcher started.
- `spawned_workers`: process groups of workers that a program starts itself.
- `phases`: the phases of a step. `stragglers`: which rank slows the others down, in which phase.
- `oversubscription`: whether a machine has more busy threads than cores.
"""

import os

FOLDER = "LOCKSTEP_PROGRESS"  # the variable with the folder in which a job's workers publish their progress
OBSERVE = "LOCKSTEP_OBSERVE"  # the variable that is 1, or a folder for records, if programs are to be observed
NOT_OBSERVED = ("", "0")  # its other values
OBSERVE_STARTED = "LOCKSTEP_OBSERVE_STARTED"  # the variable that is set if programs that the worker starts are, too
MEASURE = "LOCKSTEP_MEASURE"  # "WARMUP,STEPS,NEEDS_SAMPLES,MEMORY_LIMIT[,CHANGE]", see `world.measurement`
MEASURE_SPAWNED = "LOCKSTEP_MEASURE_SPAWNED"  # the same, for the workers that the program starts itself
CHECK = "LOCKSTEP_CHECK"  # the variable "STEPS,SECONDS", see `lockstep.script_check.hooks`
NODE = "LOCKSTEP_NODE"  # the host's number, if the launcher sets only Horovod's variables, as `horovodrun` does
REPORT = "LOCKSTEP_STRAGGLER_SECONDS"  # the variable with the least seconds between two comparisons of steps; 0: none
REPORT_SECONDS = 10.0  # its default


def of_worker(name: str) -> str:
    """Return RANK, WORLD_SIZE or LOCAL_WORLD_SIZE of this worker, or what Horovod calls it; "" if it is not set."""
    is_torchruns = NODE not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ  # which the worker has started
    return os.environ.get(name if is_torchruns else f"HOROVOD_{name.replace('WORLD_', '')}", "")
