"""`lockstep datasets`: list the data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.parse import parse


@dataclass(frozen=True)
class DatasetsCommand:
    """List the data sets that `lockstep train` knows by name."""


def main(words: Sequence[str]) -> int:
    parse(DatasetsCommand, "datasets", words)
    from rich.console import Console
    from rich.table import Table

    from lockstep import recipes
    from lockstep.data.catalog import NAMED

    table = Table("name", "training + validation", "images", "recipe", "about")
    for name, entry in NAMED.items():
        about = entry.about + ("; `lockstep data get` fetches it" if entry.fetched else "")
        table.add_row(name, entry.samples, entry.images, recipes.for_source(name), about)
    console = Console()
    console.print(table)
    console.print(
        "Any folder with train/CLASS/... and val/CLASS/... (or test) is a data set too: lockstep train FOLDER. "
        "Your own: --data MODULE:FUNCTION.",
        highlight=False,
    )
    return 0
