"""`lockstep models`: quick, and right about the networks it lists."""

from __future__ import annotations

import pytest

from lockstep.cli import main, models
from lockstep.models import registry


def test_table_has_one_line_of_100_columns_for_every_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, entry in registry.ZOO.items():
        (line,) = [line for line in lines if line.startswith("│") and line.split()[1] == name]
        assert f"{entry.parameters:,}" in line
        assert entry.about in line
        assert entry.quoted is None or f"{entry.quoted:.2f} %" in line
    assert max(map(len, lines)) <= 100


def test_torchvisions_names_are_its_own() -> None:
    assert models.torchvision_names() == registry.torchvision_names()
