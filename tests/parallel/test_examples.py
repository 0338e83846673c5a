"""The examples run as they say: scripts, the notebook in a real kernel, and the pods of the Kubernetes manifest."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import LOCKSTEP, TORCHRUN, Command, own_environment, run, started
from ports import free_port

from lockstep.cli.parse import parse_train
from lockstep.files.jsonl import read_records
from lockstep.world.launcher_environment import KUBEFLOW_VARIABLES, TRAIN_JOB_VARIABLES

EXAMPLES = Path(__file__).parents[2] / "examples"


def _accuracy(command: Command, cwd: Path) -> float:
    done = run(command, cwd, cold=True)
    assert done.returncode == 0, done.stderr
    *_, accuracy = re.findall(r"([\d.]+) % of \d+ images right", done.stdout)  # and of epochs before
    return float(accuracy)


@pytest.mark.cold  # also how Python ends, with what they leave to it
@pytest.mark.parametrize("name", ["own_loop.py", pytest.param("fit.py", marks=pytest.mark.long)])
def test_it_runs_on_two_workers(name: str, tmp_path: Path) -> None:
    assert len((EXAMPLES / "fit.py").read_text().splitlines()) < 30
    assert _accuracy([*TORCHRUN, EXAMPLES / name], tmp_path) > 90


def _text(cell: Any) -> str:
    """What a cell printed."""
    return "".join(output["text"] for output in cell["outputs"] if output["output_type"] == "stream")


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.filterwarnings("ignore")  # of the client's own
def test_notebook_trains_in_its_process_and_on_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(EXAMPLES / "fit.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    _, alone, epochs, two, failing = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")

    assert "top-1" in _text(alone)  # the run's own lines are in the cell
    share = re.search(r"([\d.]+)% of 256 images right; by class: \{'0': [\d.]+, '1': [\d.]+\}", _text(alone))
    assert share
    assert float(share.group(1)) > 80
    assert alone["outputs"][-1]["data"]["text/plain"].startswith("array([[")
    assert _text(epochs).startswith("epoch 1: training loss ")

    assert "worker 1 of 2" in _text(two)
    losses = re.search(r"\[([\d.]+), ([\d.]+)\] ([\d.]+)\n", _text(two))
    assert losses
    first, second, before = map(float, losses.groups())
    assert first == second == pytest.approx(before, abs=0.002)
    assert "optimizer='adma': must be one of sgd, adam" in _text(failing).splitlines()[-1]
    assert len([*(tmp_path / "runs").iterdir()]) == 2


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_the_pods_of_the_manifest_train_together(kind: str, tmp_path: Path) -> None:
    """With the variables that the training operator gives them."""
    roles = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    containers = [roles[role]["template"]["spec"]["containers"][0] for role in ("Master", "Worker")]
    volumes = {volume["name"] for volume in roles["Worker"]["template"]["spec"]["volumes"]}
    port, starts = free_port(), []
    for rank, container in enumerate(containers):
        program, *words = container["command"]
        assert program == "lockstep"
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert parse_train(words[1:]).job.run.resume == "auto"
        words = [word.replace("/runs", str(tmp_path)) for word in words]
        names = KUBEFLOW_VARIABLES if kind == "PyTorchJob" else TRAIN_JOB_VARIABLES
        values = {"RANK": rank, "WORLD_SIZE": 2, "PET_NODE_RANK": rank, "PET_NNODES": 2}
        values |= dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), "127.0.0.1")
        values |= dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), port)
        variables = {name: str(values[name]) for name in names}
        variables |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NPROC_PER_NODE": "auto"}
        variables |= {"GLOO_SOCKET_IFNAME": "lo"}  # both pods stand on this machine
        command = [*LOCKSTEP, *words, "--epochs", "1", "--device", "cpu"]
        starts.append(started(command, tmp_path, own_environment(**variables), output=tmp_path / f"pod-{rank}.txt"))
    with ExitStack() as stack:
        pods = [stack.enter_context(start) for start in starts]
        for pod in pods:
            assert pod.wait(120) == 0, pod.text
    assert next(r for r in read_records(tmp_path / "a" / "metrics.jsonl") if r["kind"] == "run")["workers"] == 2
