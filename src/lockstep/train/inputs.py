"""Load a run's data set, build the readers and loaders of its splits, and give advice when a worker waits for data."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.schema import TrainConfig
from lockstep.data import catalog
from lockstep.data.loaders import EvalLoader, TrainLoader, reader_for
from lockstep.data.readers import Placement, Reader
from lockstep.data.sets import EncodedSplit, ImageData, MemorySplit, Split
from lockstep.data.sharding import Sharding
from lockstep.data.transforms import Mixing
from lockstep.errors import ConfigError, DataError
from lockstep.train.network import memory_format
from lockstep.train.optim.schedule import Batching
from lockstep.train.precision import Precision
from lockstep.world.devices import usable_cores
from lockstep.world.world import World

USUAL_MOST = 8  # loader processes of a worker
MUCH = 0.1  # fraction of an epoch's time above which advice is printed
LITTLE_SECONDS = 0.5  # per epoch; no advice below this


@dataclass(frozen=True)
class Loading:
    """The data and its loaders."""

    data: ImageData
    train_loader: TrainLoader
    val_loader: EvalLoader
    data_wait: DataWait


def load_data(config: TrainConfig, world: World, kept: ImageData | None = None) -> ImageData:
    """Load the data set on every worker; if it must be downloaded, local rank 0 of each node does so first.

    Args:
        kept: The data set of the previous generation.
    """
    name, data = config.data.source, kept
    if name in catalog.NAMED and catalog.NAMED[name].fetched:
        if world.rank_info.local_rank == 0 and not kept:
            data = catalog.load(config.data, download=config.data.download)
        world.barrier()
    data = data or catalog.load(config.data)
    if not len(data.train) or not len(data.val):
        raise DataError(f"{name}: the training and validation sets must not be empty")
    return data


def check_decoding(config: TrainConfig, data: ImageData, world: World) -> None:
    """Reject --decode gpu if the images, or the device of this worker, do not support it."""
    if config.data.decode != "gpu":
        return
    if not isinstance(data.train, EncodedSplit):
        raise ConfigError(f"--decode gpu: needs image files that are read during training, but {data.name} has none")
    if world.device.type != "cuda":
        raise ConfigError(f"--decode gpu: worker {world.rank} runs on {world.device.type}; leave out --decode")


def build_loading(
    config: TrainConfig, world: World, data: ImageData, sharding: Sharding, precision: Precision, batching: Batching
) -> tuple[Loading, list[str]]:
    """Return the loaders of both splits, and lines to print.

    Raises:
        ConfigError: --decode gpu, which the images or the device do not support.
    """
    check_decoding(config, data, world)
    cores, notes = cores_of_worker(world), list[str]()
    processes = choose_processes(config, world, data.train, cores)
    if config.data.loader_workers == "auto" and not isinstance(data.train, MemorySplit):
        notes = [f"{count_processes(processes)} per worker (from the number of cores)"]
    reader = _build_reader(config, world, data, data.train, precision, processes, config.data.decode == "gpu")
    train_loader = TrainLoader(reader, sharding, world.device, Mixing(config.augment, config.seed))
    val_loader = build_val_loader(config, world, data, precision, batching)
    return Loading(data, train_loader, val_loader, DataWait(advise(data.train, processes, cores))), notes


def build_val_loader(
    config: TrainConfig, world: World, data: ImageData, precision: Precision, batching: Batching
) -> EvalLoader:
    """Return the loader of this worker's validation samples, with the batch size of a training forward pass."""
    one_pass = -(-batching.global_batch // (world.size * batching.accumulate))
    processes = choose_processes(config, world, data.val, cores_of_worker(world))
    reader = _build_reader(config, world, data, data.val, precision, processes)
    return EvalLoader(reader, len(data.val), one_pass, world.rank, world.size, world.device)


def _build_reader(
    config: TrainConfig,
    world: World,
    data: ImageData,
    split: Split,
    precision: Precision,
    processes: int,
    on_device: bool = False,
) -> Reader:
    return reader_for(
        split,
        data.input,
        Placement(world.device, precision.input_dtype, memory_format(config), precision.loss_dtype),
        config.augment,
        seed=config.seed,
        processes=processes,
        skip_corrupt=config.data.skip_corrupt,
        on_device=on_device,
    )


def count_processes(number: int) -> str:
    """Format a number of loader processes."""
    return f"{number} loader process{'' if number == 1 else 'es'}"


def cores_of_worker(world: World) -> int:
    """Return the worker's share of the usable cores of its node."""
    return max(1, usable_cores() // world.rank_info.local_size)


def choose_processes(config: TrainConfig, world: World, split: Split, own_cores: int) -> int:
    """Return the number of loader processes per worker: as configured, or one per core, at most 8.

    Collective; equal on all workers. `lockstep study loading` measures which number helps.
    """
    if isinstance(split, MemorySplit):
        return 0
    if config.data.loader_workers != "auto":
        return config.data.loader_workers
    return int(min(USUAL_MOST, *world.gather(own_cores)))


def advise(split: Split, processes: int, cores: int) -> str:
    """Return advice in one line, for a worker with `processes` loader processes."""
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
