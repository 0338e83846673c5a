"""docs/reference/models.md says of each network what the registry says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.models.registry import ZOO

TABLE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ZOO)
def test_every_network_has_its_row(name: str) -> None:
    entry = ZOO[name]
    (row,) = [line for line in TABLE.splitlines() if line.startswith(f"| `{name}` |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    quoted = f"{entry.quoted:.2f} %" if entry.quoted else "-"
    assert cells[2:5] == [f"{entry.parameters:,}", f"{entry.multiply_adds / 1e6:,.1f} M", quoted]
    assert (entry.paper or "-") in cells[6]
