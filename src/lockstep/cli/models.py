"""`lockstep models`: list the models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lockstep.cli.parse import parse


@dataclass(frozen=True)
class ModelsCommand:
    """List the models that --arch takes, with their sizes and published accuracies."""


def torchvision_names() -> list[str]:
    """Return torchvision's classifiers, found by parsing its source, since importing them takes 4 s."""
    found = find_spec("torchvision")
    folder = Path(found.origin).parent / "models" if found and found.origin else Path()
    registered = re.compile(r"^@register_model\(\)(?:\n@.*)*\ndef (\w+)", re.MULTILINE)
    return sorted(name for path in folder.glob("*.py") for name in registered.findall(path.read_text("utf-8")))


def main(arguments: Sequence[str]) -> int:
    parse(ModelsCommand, "models", arguments)
    from rich.console import Console
    from rich.table import Table

    from lockstep.models import registry

    table = Table(title="Lockstep's models (10 classes)", title_justify="left")
    for heading in ("name", "parameters", "mult-adds", "quoted"):
        table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    table.add_column("about")
    for name, entry in registry.ZOO.items():
        table.add_row(
            name,
            f"{entry.parameters:,}",
            f"{entry.multiply_adds / 1e6:,.0f} M",
            f"{entry.quoted:.2f} %" if entry.quoted else "",
            entry.about,
        )
    console = Console()
    console.print(table)
    console.print(
        "Mult-adds: millions of multiply-adds per image, in convolutions and linear layers. "
        "Quoted: CIFAR-10 top-1 as published for 200 epochs (docs/reference/models.md), not measured here.",
        highlight=False,
    )
    console.print("\ntorchvision's models, for color images of any size that their layers accept:", highlight=False)
    console.print(", ".join(torchvision_names()), highlight=False)
    console.print(
        f"\nA name in both lists means Lockstep's model for images of up to {registry.SMALL_SIDE} pixels a side, and "
        f"torchvision's for larger ones; torchvision/NAME always means torchvision's. timm/NAME is timm's model "
        f"(pip install 'lockstep-torch\\[timm]'). Custom models: --model MODULE:FUNCTION.",
        highlight=False,
    )
    return 0
