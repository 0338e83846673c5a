"""`lockstep study loading`: the rate of data loading by number of loader processes, beside a model's demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from lockstep.cli.json_output import print_json
from lockstep.cli.parse import parse
from lockstep.cli.script import split_at_dashes
from lockstep.cli.study import empty_table, read_job, show_number
from lockstep.config.flags import arg
from lockstep.errors import require
from lockstep.world import accelerator

if TYPE_CHECKING:
    from lockstep.study.loading import Figure, LoadingStudy


@dataclass(frozen=True)
class LoadingCommand:
    """Measure data loading: the rate by number of loader processes, and of each stage.

    The job's `lockstep train` flags follow `--`.

    Examples:
        lockstep study loading -j 0 1 2 -- /data/photos -a resnet18 -b 64
    """

    processes: Annotated[tuple[int, ...], arg(name="workers", aliases=["-j"], metavar="N")] = ()
    """Numbers of loader processes. Default: 0, 1, 2, 4, ... up to the cores."""
    seconds: float = 0.5
    """Seconds per measurement; each is repeated 5 times."""
    out: Path = Path("study/loading.jsonl")
    """File to append the record to."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        given = " ".join(map(str, self.processes))
        require(all(number >= 0 for number in self.processes), "--workers", given, "at least 0")
        require(0 < self.seconds < float("inf"), "--seconds", self.seconds, "above 0")


def main(arguments: Sequence[str]) -> int:
    flags, job = split_at_dashes(arguments)
    command = parse(LoadingCommand, "study loading", flags)
    config = read_job(job)
    from lockstep.data import catalog
    from lockstep.study import loading as stages
    from lockstep.study.loading import LoadingStudy, candidates
    from lockstep.study.points import append_record, check_record_file
    from lockstep.train.optim.schedule import plan_batches
    from lockstep.world.devices import usable_cores
    from lockstep.world.launcher_environment import RankInfo
    from lockstep.world.machine import describe_commits, describe_machine
    from lockstep.world.world import connect

    with connect(RankInfo(), config.device) as world:
        data, batching = catalog.load(config.data, config.data.download), plan_batches(config, 1)
        batch = max(1, batching.global_batch // batching.accumulate)
        setting = stages.Setting(config, data, world, batch, command.seconds)
        setting.reader(0).close()  # rejects an augmentation that does not suit the data set
        check_record_file(command.out)
        name = "the CPU" if world.device.type == "cpu" else accelerator.name()
        print(
            f"{data.name}: {len(data.train):,} training images, {data.input.width} x {data.input.height} as the model "
            f"sees them, batches of {batch}, on {name}; medians of 5 x {command.seconds:g} s",
            flush=True,
        )
        demand = stages.measure_demand(setting)
        measured = list(stages.measure_stages(setting))  # first, because the pipeline fills the page cache
        numbers = sorted({*(command.processes or candidates(usable_cores()))})
        study = LoadingStudy(measured, dict(stages.measure_pipeline(setting, numbers)), demand)
        Console(highlight=False).print(_table(study))
        print("\n".join(study.verdict()))
        settings = {
            "data": data.name,
            "samples": len(data.train),
            "image": [data.input.channels, data.input.height, data.input.width],
            "batch": batch,
            "device": world.device.type,
            "seconds": command.seconds,
            "environment": {**describe_machine(1), **describe_commits()},
        }
        record = study.to_mapping()
        append_record(command.out, {**record, **settings})
        if command.json:
            rows = [{**row, "wait_share": study.waits[row["processes"]]} for row in record["pipeline"]]
            print_json({"rows": rows, "demand": record["demand"], "verdict": record["verdict"]})
    print(f"recorded in {command.out}")
    return 0


def _table(study: LoadingStudy) -> Table:
    table = empty_table("", ("loader processes", "images/s", "quartiles", "the model waits"))
    for number, figure in study.pipeline.items():
        table.add_row(f"{number}", *_rates(figure), f"{100 * study.waits[number]:.0f} %")
    table.add_section()
    table.add_row(study.demand.about.partition(":")[0], *_rates(study.demand))
    return table


def _rates(figure: Figure) -> tuple[str, str]:
    low, median, high = map(show_number, figure.images_per_second)
    return median, f"{low} to {high}"
