"""`lockstep study loading`: the rate of data loading by number of loader processes, beside a model's demand."""

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
    from lockstep.study.loading import LoadingStudy


@dataclass(frozen=True)
class LoadingCommand:
    """Measure data loading: the rate by number of loader processes, and of each stage.

    Augmentation is that of the data set's recipe, as in `lockstep train`; flags override it.
    """

    common: ClassVar[dict[str, str]] = {
        "Data": "DATASET|FOLDER --data --data-dir --download --in-memory --image-size --skip-corrupt",
        "Model": "--arch --precision --device",
        "Measurement": "--workers --batch-size --seconds --out",
    }
    removed: ClassVar[dict[str, str]] = {"--repeats": "removed; each rate is measured 5 times, for --seconds"}

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
    seconds: float = 0.5
    """Seconds per measurement; each is repeated 5 times."""
    out: Path = Path("study/loading.jsonl")
    """File to append the record to."""

    def __post_init__(self) -> None:
        given = " ".join(map(str, self.processes))
        require(all(number >= 0 for number in self.processes), "--workers", given, "at least 0")
        require(self.batch_size >= 1, "--batch-size", self.batch_size, "at least 1")
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
    from lockstep.run.records.run_folder import describe_publicly
    from lockstep.study import stages
    from lockstep.study.loading import LoadingStudy, candidates
    from lockstep.study.points import append_record, check_record_file
    from lockstep.world.devices import usable_cores
    from lockstep.world.launcher_environment import RankInfo
    from lockstep.world.world import connect

    with connect(RankInfo(), command.device) as world:
        data, batch = catalog.load(config, config.download), command.batch_size
        place = Placement(world.device)
        setting = stages.Setting(data, command.augment, batch, place, config.skip_corrupt, command.seconds)
        setting.reader(0).close()  # rejects an augmentation that does not suit the data set
        check_record_file(command.out)
        name = "the CPU" if world.device.type == "cpu" else accelerator.name()
        print(
            f"{data.name}: {len(data.train):,} training images, {data.input.width} x {data.input.height} as the model "
            f"sees them, batches of {batch}, on {name}; medians of {setting.repeats} x {command.seconds:g} s",
            flush=True,
        )
        demand = stages.measure_demand(setting, command.arch, command.precision) if command.arch else None
        measured = list(stages.measure_stages(setting))  # first, because the pipeline fills the page cache
        numbers = command.processes or (0, *candidates(usable_cores()))
        pipeline = dict(stages.measure_pipeline(setting, sorted(set(numbers))))
        study = LoadingStudy(measured, pipeline, demand)
        Console(highlight=False).print(_table(study))
        for line in study.verdict():
            print(line)
        settings = {
            "data": data.name,
            "samples": len(data.train),
            "image": [data.input.channels, data.input.height, data.input.width],
            "batch": batch,
            "device": world.device.type,
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


def _table(study: LoadingStudy) -> Table:
    table = Table("loader processes", show_edge=False, pad_edge=False)
    waits = study.waits
    for heading in ("images/s", "quartiles", *(["the model waits"] if waits else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, figure in study.pipeline.items():
        table.add_row(f"{number}", *_rates(figure), *([f"{100 * waits[number]:.0f} %"] if waits else []))
    if study.demand:
        table.add_section()
        table.add_row(study.demand.about.partition(":")[0], *_rates(study.demand))
    return table


def _rates(figure: Figure) -> tuple[str, str]:
    low, median, high = map(show_number, figure.images_per_second)
    return median, f"{low} to {high}"
