"""The architecture's figure and page say what the imports say."""

from __future__ import annotations

import re

from architecture import FIGURE, ORDER, draw
from layers import LAYERS
from pages import ROOT

PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()


def test_the_figure_is_drawn_from_the_imports() -> None:
    assert FIGURE.read_text() == draw(), "run `python tests/support/architecture.py`"


def test_every_package_is_in_the_figure() -> None:
    assert sorted(ORDER) == sorted(name for name, layer in LAYERS.items() if layer >= 1)


def test_page_names_every_package_and_its_layer() -> None:
    rows = {name: int(layer) for layer, name in re.findall(r"^\| ([1-9]) \| `([\w]+)", PAGE, flags=re.MULTILINE)}
    assert rows == {name: int(layer) for name, layer in LAYERS.items() if layer >= 1}


def test_the_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`([\w/]+\.(?:py|yaml))`", PAGE):
        assert (ROOT / "src" / "lockstep" / name).is_file(), name
