"""`lockstep data get`: download a data set before a job, for example on a login node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.config.schema import DataConfig
from lockstep.errors import DataError


@dataclass(frozen=True)
class GetCommand:
    """Download a data set, for jobs on nodes without internet access."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Data set (see `lockstep datasets`)."""
    data_dir: Path = Path("data")
    """Folder for downloaded data sets, as in `lockstep train`."""


def main(arguments: Sequence[str]) -> int:
    command = parse(GetCommand, "data get", arguments)
    from lockstep.data import catalog

    fetched = [name for name, entry in catalog.NAMED.items() if entry.fetched]
    if command.name not in fetched:
        near = get_close_matches(command.name, fetched, n=1)
        hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(fetched)}"
        raise DataError(f"{command.name!r} cannot be downloaded; {hint}")
    data = catalog.load(DataConfig(dataset=command.name, data_dir=command.data_dir), download=True)
    print(f"{command.name} is in {command.data_dir}: {len(data.train):,} + {len(data.val):,} images")
    return 0
