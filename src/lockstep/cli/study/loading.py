"""`lockstep study loading`: the rate of data loading, by stage and by number of loader processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rich.console import Console
from rich.table import Table

from lockstep.cli.parse import Arch, parse
from lockstep.cli.study import show_number
from lockstep.config.flags import Positional, arg
from lockstep.config.schema import AugmentConfig, DataConfig, DeviceChoice
from lockstep.data import catalog
from lockstep.errors import require
from lockstep.world import accelerator

if TYPE_CHECKING:
    from lockstep.study.figures import Figure


@dataclass(frozen=True)
class LoadingCommand:
    """Measure data loading: the rate of each stage, then of loader processes.

    Augmentation is that of the data set's recipe, as in `lockstep train`; flags override it.
    """

    common: ClassVar[dict[str, str]] = {
        "Data": "DATASET|FOLDER --data --data-dir --download --in-memory --image-size --skip-corrupt",
        "Model": "--arch --precision --device",
        "Measurement": "--workers --batch-size --repeats --seconds --out",
    }

    dataset: Annotated[Positional[str], arg(metavar="DATASET|FOLDER")] = ""
    """Data set (see `lockstep datasets`) or image folder. Default: digits."""
    data: Annotated[str | None, arg(metavar="MODULE:FUNCTION")] = None
    """Custom data: a function that returns (training set, validation set)."""
    processes: Annotated[tuple[int, ...], arg(name="workers", aliases=["-j"], metavar="N")] = ()
    """Numbers of loader processes. Default: 0, 1, 2, 4, ... up to the cores."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 64
    """Images per batch."""
    arch: Arch = None
    """Also measure the training steps of this model on the device."""
    precision: Literal["fp32", "tf32", "bf16", "O0", "O1", "O2", "O3"] = "fp32"
    """Precision of the model."""
    device: DeviceChoice = "auto"
    """Device; auto: the GPU if there is one."""
    data_dir: Path = Path("data")
    """Folder for downloaded data sets."""
    download: bool = True
    """Fail if the data set is missing, instead of downloading it."""
    in_memory: Literal["auto", "always", "never"] = "auto"
    """Decode a folder once and keep it in memory; auto: if small enough."""
    image_size: int | None = None
    """Side of the square crop of a folder's images, in pixels."""
    skip_corrupt: bool = False
    """Skip images that cannot be decoded, instead of failing."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    repeats: int = 5
    """Repeats of each measurement."""
    seconds: float = 0.5
    """Seconds per repeat."""
    out: Path = Path("study/loading.jsonl")
    """File to append the record to."""

    def __post_init__(self) -> None:
        given = " ".join(map(str, self.processes))
        require(all(number >= 0 for number in self.processes), "--workers", given, "at least 0")
        for flag, value in (("--batch-size", self.batch_size), ("--repeats", self.repeats)):
            require(value >= 1, flag, value, "at least 1")
        require(0 < self.seconds < float("inf"), "--seconds", self.seconds, "above 0")

    @property
    def data_config(self) -> DataConfig:
        """The data configuration that `lockstep train` would have."""
        return DataConfig(
            dataset=self.dataset,
            data=self.data,
            data_dir=self.data_dir,
            download=self.download,
            in_memory=self.in_memory,
            image_size=self.image_size,
            skip_corrupt=self.skip_corrupt,
        )


def main(arguments: Sequence[str]) -> int:
    command = _parse(arguments)
    config = command.data_config
    catalog.check(config)
    from lockstep.data.readers import Placement
    from lockstep.study import loading
    from lockstep.study.figures import append_record, check_record_file
    from lockstep.study.loading import StageLength
    from lockstep.study.stages import Setting
    from lockstep.train.run_folder import describe_publicly
    from lockstep.world.devices import usable_cores
    from lockstep.world.launcher_environment import RankInfo
    from lockstep.world.world import connect

    console = Console()
    length = StageLength(command.repeats, command.seconds)
    with connect(RankInfo(), command.device) as world:
        data = catalog.load(config, config.download)
        device = world.device
        name = "the CPU" if device.type == "cpu" else accelerator.name()
        setting = Setting(data, command.augment, command.batch_size, Placement(device), 0, config.skip_corrupt)
        loading.check(setting)
        check_record_file(command.out)
        console.print(
            f"{data.name}: {len(data.train):,} training images, {data.input.width} x {data.input.height} as the model "
            f"sees them, batches of {command.batch_size}, on {name}; medians of {command.repeats} x "
            f"{command.seconds:g} s, stages on one core each",
            highlight=False,
            soft_wrap=True,
        )
        demand = loading.measure_demand(setting, command.arch, command.precision, length) if command.arch else None
        if demand:
            console.print(_table("model", [(command.arch or "", demand)], about=False, reads=False))
        stages = list(loading.measure_stages(setting, length))
        console.print(_table("stage", [(stage.name, stage) for stage in stages]))
        processes = command.processes or (0, *loading.candidates(usable_cores()))
        pipeline = dict(loading.measure_pipeline(setting, sorted(set(processes)), loading.image_bytes(stages), length))
        console.print(_table("whole pipeline", [(figure.about, figure) for figure in pipeline.values()], about=False))
        study = loading.LoadingStudy(stages, pipeline, demand)
        for line in [*loading.describe_storage(stages), *study.verdict()]:
            console.print(line, highlight=False, soft_wrap=True)
        settings = {
            "data": data.name,
            "samples": len(data.train),
            "image": [data.input.channels, data.input.height, data.input.width],
            "batch": command.batch_size,
            "device": device.type,
            "seconds": command.seconds,
            "environment": describe_publicly(world),
        }
        append_record(command.out, {**study.to_mapping(), **settings})
        print(f"recorded in {command.out}")
    return 0


def _parse(arguments: Sequence[str]) -> LoadingCommand:
    """Parse the arguments; they override the augmentation of the data set's recipe."""
    first = parse(LoadingCommand, "study loading", arguments)
    from lockstep.config import recipes

    recipe = recipes.load(recipes.for_source(first.data_config.source))
    return parse(LoadingCommand, "study loading", arguments, replace(LoadingCommand(), augment=recipe.augment))


def _table(title: str, rows: Sequence[tuple[str, Figure]], about: bool = True, reads: bool = True) -> Table:
    table = Table(title, show_edge=False, pad_edge=False)
    for heading in ("images/s", "quartiles", *(("MB/s", "reads/s") if reads else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    if about:
        table.add_column("what")
    for name, figure in rows:
        low, median, high = map(show_number, figure.images_per_second)
        cells = [name, median, f"{low} to {high}"]
        if reads:
            operations = figure.operations_per_second
            counted = show_number(operations.median) if operations else "-"
            cells += [show_number(figure.bytes_per_second.median / 1e6), counted]
        table.add_row(*cells, *([figure.about] if about else []))
    return table
