"""`lockstep data info`: describe a folder of images or a pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.cli.parse import parse
from lockstep.config.flags import Positional, arg
from lockstep.files.untrusted import printable_name

if TYPE_CHECKING:
    from lockstep.data.sources.describe import SetFacts, SplitFacts


@dataclass(frozen=True)
class InfoCommand:
    """Describe a folder of images or a pack: classes, images, bytes, formats and sizes."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """Folder with train/ and val/ (or test/), or a pack."""


def main(arguments: Sequence[str]) -> int:
    command = parse(InfoCommand, "data info", arguments)
    from rich.console import Console
    from rich.table import Table

    from lockstep.data.sources.describe import describe

    facts = describe(command.path)
    table = Table("", *(split.name for split in facts.splits), show_edge=False)
    columns = [_rows(split) for split in facts.splits]
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    console = Console(highlight=False)
    console.print(printable_name(f"{command.path}: {_kind(facts)}"), markup=False, soft_wrap=True)
    console.print(table)
    return 0


def _kind(facts: SetFacts) -> str:
    classes = f"{len(facts.classes):,} classes: {', '.join(facts.classes[:6])}" + ", ..." * (len(facts.classes) > 6)
    if facts.manifest is None:
        return f"a folder of images, {classes}"
    side = facts.manifest.settings.get("short_side")
    resized = f", short sides at most {side}" if side else ""
    return f"a pack of {facts.manifest.name}{resized}, {classes}"


def _rows(split: SplitFacts) -> dict[str, str]:
    rows = {
        "images": f"{split.samples:,}",
        "images per class": " to ".join(f"{count:,}" for count in dict.fromkeys(split.class_sizes)),
        "MB": f"{split.size_bytes / 1e6:,.1f}",
        "KB per image": f"{split.size_bytes / split.samples / 1e3:,.1f}",
        "tar files": f"{split.shards:,}",
        "inspected": f"{split.looked_at:,}" + f", {split.unreadable:,} unreadable" * (split.unreadable > 0),
        "formats": ", ".join(f"{form} {count:,}" for form, count in split.forms.most_common()),
        "short side": _spread(split.short_sides),
        "long side": _spread(split.long_sides),
    }
    return rows if split.shards else {name: cell for name, cell in rows.items() if name != "tar files"}


def _spread(sides: tuple[int, int, int]) -> str:
    smallest, median, largest = sides
    return f"{smallest} to {largest}, median {median}" if smallest < largest else f"{smallest}"
