"""`lockstep datasets`: list the data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.parse import parse


@dataclass(frozen=True)
class DatasetsCommand:
    """List the data sets that `lockstep train` takes by name."""


def main(arguments: Sequence[str]) -> int:
    parse(DatasetsCommand, "datasets", arguments)
    from rich.console import Console
    from rich.table import Table

    from lockstep.config import recipes
    from lockstep.data.catalog import NAMED

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("name", "samples", "images", "recipe", "about"):
        table.add_column(column, no_wrap=True)
    for name, entry in NAMED.items():
        table.add_row(name, entry.samples, entry.images, recipes.for_source(name), entry.about)
    console = Console()
    console.print(table)
    fetched = ", ".join(name for name, entry in NAMED.items() if entry.fetched)
    console.print(f"Samples are training + validation. `lockstep data get` fetches {fetched}.", highlight=False)
    console.print("For imagenet, put your copy in DATA_DIR/imagenet.", highlight=False)
    console.print(
        "Any folder with train/CLASS/... and val/CLASS/... (or test) also works as a data set: lockstep train FOLDER. "
        "Custom data: --data MODULE:FUNCTION.",
        highlight=False,
    )
    return 0
