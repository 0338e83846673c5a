"""The example notebook, executed by a real kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "fit.ipynb"


def _text(cell: Any) -> str:
    """What a cell printed."""
    return "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")


@pytest.mark.cold
@pytest.mark.filterwarnings("ignore")  # of the client's own
def test_example_trains_in_its_own_process_and_on_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    _, alone, plot, two, failing = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")

    assert "top-1" in _text(alone)  # the run's own lines are in the cell
    share = re.search(r"([\d.]+)% of 256 images right; by class: \{'0': [\d.]+, '1': [\d.]+\}", _text(alone))
    assert share
    assert float(share.group(1)) > 80
    assert alone["outputs"][-1]["data"]["text/plain"].startswith("array([[")
    assert "image/svg+xml" in plot["outputs"][-1]["data"]

    assert "worker 1 of 2" in _text(two)
    losses = re.search(r"\[([\d.]+), ([\d.]+)\] ([\d.]+)\n", _text(two))
    assert losses
    first, second, before = map(float, losses.groups())
    assert first == second == pytest.approx(before, abs=0.002)
    assert "optimizer='adma': must be one of sgd, adam" in _text(failing).splitlines()[-1]
    assert len([*(tmp_path / "runs").iterdir()]) == 2
