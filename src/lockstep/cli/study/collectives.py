"""`lockstep study collectives`: latency and bandwidth of collectives between workers, by message size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lockstep.cli.parse import Workers, parse
from lockstep.cli.study import show_number
from lockstep.config.flags import arg
from lockstep.config.schema import BackendChoice, DeviceChoice
from lockstep.config.values import parse_size
from lockstep.errors import ConfigError, plural, require
from lockstep.launch.command_workers import WorkerCommand, run_workers
from lockstep.launch.plan.options import LaunchOptions
from lockstep.world.world import World

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.study.collectives import SizePoint

Name = Literal["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"]


@dataclass(frozen=True)
class CollectivesCommand:
    """Measure latency and bandwidth of collectives between workers, by message size.

    Sizes and bandwidths are as in nccl-tests. Operations recorded with the same settings are skipped.
    """

    operations: Annotated[tuple[Name, ...], arg(metavar="NAME")] = ()
    """all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all or barrier. Default: all."""
    min_size: Annotated[str, arg(metavar="BYTES")] = "4"
    """Smallest size of the whole array, such as 4 or 1K."""
    max_size: Annotated[str, arg(metavar="BYTES")] = "64MiB"
    """Largest size of the whole array."""
    factor: int = 4
    """Factor between successive sizes."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Data type."""
    repeats: int = 20
    """Maximum number of measurements per size."""
    seconds: float = 1.0
    """Approximate time per size; at least three measurements are made."""
    workers: Workers = None
    """Total number of workers; auto: one per GPU. Default: one per slot."""
    where: LaunchOptions = field(default_factory=LaunchOptions)
    device: DeviceChoice = "auto"
    """Device; auto: the GPU if there is one."""
    dist_backend: BackendChoice = "auto"
    """Communication backend; auto: nccl or xccl for GPUs, gloo for CPUs."""
    out: Path = Path("study/collectives.jsonl")
    """File to append the records to."""
    again: bool = False
    """Repeat recorded measurements."""

    def __post_init__(self) -> None:
        low, high = parse_size(self.min_size, "--min-size"), parse_size(self.max_size, "--max-size")
        require(low <= high, "--min-size", self.min_size, f"at most --max-size {self.max_size}")
        require(self.factor >= 2, "--factor", self.factor, "at least 2")
        require(self.repeats >= 1, "--repeats", self.repeats, "at least 1")
        require(0 < self.seconds < float("inf"), "--seconds", self.seconds, "above 0")


def main(arguments: Sequence[str]) -> int:
    command = parse(CollectivesCommand, "study collectives", arguments)
    work = partial(_measure, command)
    return run_workers(
        WorkerCommand(
            ["study", "collectives", *arguments],
            work,
            command.device,
            workers=command.workers,
            backend=command.dist_backend,
            where=command.where,
            check=_check_workers,
        )
    )


def _check_workers(size: int) -> None:
    if size < 2:
        raise ConfigError("collectives need at least two workers; for example, add -np 2")


def _measure(command: CollectivesCommand, world: World) -> None:
    from lockstep.study import collectives
    from lockstep.study.figures import append_study

    _check_workers(world.size)
    low, high = parse_size(command.min_size, "--min-size"), parse_size(command.max_size, "--max-size")
    sizes = collectives.sizes_between(low, high, command.factor)
    length = collectives.SizeLength(command.repeats, command.seconds)
    settings = collectives.describe(world, command.dtype, sizes, length)
    wanted = dict.fromkeys(command.operations or collectives.NAMES)
    known = _known(command.out, settings, world) - (wanted.keys() if command.again else set())
    if world.is_main:
        _introduce(settings, [name for name in wanted if name in known], command.out)
    for name in wanted:
        if name in known:
            continue
        outcome = collectives.measure(world, name, sizes, collectives.DTYPES[command.dtype], length)
        if not world.is_main:
            continue
        if isinstance(outcome, str):
            print(f"{name}: not supported by {settings['backend']}: {outcome}", flush=True)
            result: dict[str, object] = {"unsupported": outcome}
        else:
            _show(name, outcome)
            result = {"points": [point.to_mapping() for point in outcome]}
        append_study(command.out, {**settings, "operation": name, **result}, world.device)
    if world.is_main and not known >= wanted.keys():
        print(f"recorded in {command.out}")


def _known(out: Path, settings: dict[str, object], world: World) -> set[str]:
    """Return, on every worker, the operations that rank 0 found already recorded with these settings.

    Raises:
        ConfigError: Rank 0 cannot write the file; raised on all workers.
    """
    from lockstep.files.jsonl import read_records
    from lockstep.study.collectives import recorded
    from lockstep.study.figures import check_record_file

    def read() -> list[str]:
        check_record_file(out)
        return sorted(recorded(read_records(out), settings)) if out.exists() else []

    return set(world.on_main(read))


def _introduce(settings: dict[str, object], skipped: Sequence[str], out: Path) -> None:
    print(
        f"{settings['workers']} workers on {plural(str(settings['nodes']), 'node')}, "
        f"{settings['backend']} on {settings['device']}, {settings['dtype']}; medians of up to {settings['repeats']} "
        f"repeats, each the slowest worker's time of one call",
        flush=True,
    )
    if skipped:
        print(f"already in {out}: {', '.join(skipped)}; add --again to repeat them", flush=True)


def _show(name: str, points: Sequence[SizePoint]) -> None:
    from rich.console import Console

    Console().print(_table(name, points))


def _table(name: str, points: Sequence[SizePoint]) -> Table:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column(name, justify="right", no_wrap=True, min_width=14)
    for heading in ("time (µs)", "quartiles", "algorithm MB/s", "bus MB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        low, median, high = (show_number(1e6 * seconds) for seconds in point.seconds)
        rates = [point.algorithm_bandwidth, point.bus_bandwidth]
        size = f"{point.size_bytes:,} B" if point.size_bytes else ""
        table.add_row(
            size, median, f"{low} to {high}", *("" if rate is None else show_number(rate / 1e6) for rate in rates)
        )
    return table
