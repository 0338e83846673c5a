"""`lockstep models`: list the networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.parse import parse


@dataclass(frozen=True)
class ModelsCommand:
    """List the networks that `--arch` knows."""


def main(words: Sequence[str]) -> int:
    parse(ModelsCommand, "models", words)
    import torch
    from rich.console import Console
    from rich.table import Table

    from lockstep.models import registry

    table = Table("name", "parameters", "about", title="Networks of Lockstep (10 classes)", title_justify="left")
    for name, entry in registry.ZOO.items():
        with torch.device("meta"):
            model = registry.build(name, num_classes=10, in_channels=entry.in_channels, side=32)
        table.add_row(name, f"{sum(parameter.numel() for parameter in model.parameters()):,}", entry.about)
    console = Console()
    console.print(table)
    console.print("Networks of torchvision, for colour images of any size their layers allow:", highlight=False)
    console.print(", ".join(registry.torchvision_names()), highlight=False)
    console.print(
        f"A name in both lists means the first for images of up to {registry.SMALL_SIDE} pixels a side; "
        f"torchvision/NAME always means torchvision's. Your own: --model MODULE:FUNCTION.",
        highlight=False,
    )
    return 0
