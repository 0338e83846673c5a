"""The number of loader processes, and advice in one line when a worker waits for data."""

from __future__ import annotations

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import MemorySplit, Split
from lockstep.world.devices import usable_cores
from lockstep.world.world import World

USUAL_MOST = 8


def count_processes(number: int) -> str:
    """Format a number of loader processes."""
    return f"{number} loader process{'' if number == 1 else 'es'}"


def cores_of_worker(world: World) -> int:
    """Return the worker's share of the usable cores of its node."""
    return max(1, usable_cores() // world.rank_info.local_size)


def choose_processes(config: TrainConfig, world: World, split: Split) -> int:
    """Return the number of loader processes per worker: as configured, or one per core, at most 8.

    Collective; equal on all workers. `lockstep study loading` measures which number helps.
    """
    if isinstance(split, MemorySplit):
        return 0
    if config.data.loader_workers != "auto":
        return config.data.loader_workers
    cores: int = min(world.gather(cores_of_worker(world)))
    return min(USUAL_MOST, cores)


MUCH = 0.1  # fraction of an epoch's time above which advice is printed
LITTLE_SECONDS = 0.5  # per epoch; no advice below this


def advise(split: Split, world: World, processes: int) -> str:
    """Return advice in one line, for a worker with `processes` loader processes."""
    cores = cores_of_worker(world)
    if processes < cores and not isinstance(split, MemorySplit):
        return (
            f"raise -j from {processes} to {cores}, the number of cores of this worker; `lockstep study loading` "
            f"measures what helps"
        )
    return "`lockstep study loading` shows the bottleneck (docs/howto/when-scaling-disappoints.md, Input)"


class DataWait:
    """Gives advice once if an epoch spends much time waiting for data."""

    def __init__(self, advice: str):
        self._advice = advice
        self._has_started, self._start_seconds = False, 0.0

    def first_batch(self, seconds: float) -> None:
        """Record how long an epoch's first batch took; a session's first batch includes starting the processes."""
        if not self._has_started:
            self._has_started, self._start_seconds = True, seconds

    def lines(self, wait_seconds: float, epoch_seconds: float) -> list[str]:
        """Return lines to print after an epoch of `epoch_seconds`, including `wait_seconds` of waiting."""
        start, self._start_seconds = self._start_seconds, 0.0
        if wait_seconds <= max(LITTLE_SECONDS, MUCH * epoch_seconds):
            return []
        if wait_seconds - start <= MUCH * (epoch_seconds - start):
            return [f"waiting for data took {wait_seconds:.1f} s, {start:.1f} s of it for the session's first batch"]
        advice, self._advice = self._advice, ""
        if not advice:
            return []
        return [f"waiting for data took {100 * wait_seconds / epoch_seconds:.0f} % of the epoch: {advice}"]
