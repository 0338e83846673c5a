"""The examples of docs/howto/extend.md work where they say they go, and CONTRIBUTING.md has all layers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import own_environment, run
from layers import LAYERS
from pages import ROOT, blocks

from lockstep.models.saved_weights import read_safetensors

PAGE = ROOT / "docs" / "howto" / "extend.md"


def _apply(diff: str, root: Path) -> None:
    """Change files as the blocks of a diff say; each hunk begins with its file's name, and is found by its lines."""
    for hunk in re.split(r"(?m)^--- ", diff)[1:]:
        name, _, body = hunk.partition("\n")
        lines = body.rstrip("\n").split("\n")
        before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        text = (root / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"extend.md: {name} does not have these lines once:\n{before}"
        (root / name).write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with all examples in it."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for block in blocks(PAGE):
        if block.language == "diff":
            _apply(f"{block.text}\n", folder)
        elif "file" in block.marks:
            assert not (folder / block.marks["file"]).exists()
            (folder / block.marks["file"]).write_text(f"{block.text}\n", encoding="utf-8")
    return folder


def _run(project: Path, *words: str, **variables: str) -> str:
    environment = own_environment(PYTHONPATH=str(project / "src"), **variables)
    done = run([sys.executable, *words], project, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _train(project: Path, name: str, flags: str) -> list[dict[str, Any]]:
    """Train on the example's data set with the example's model; the run's records."""
    folder = project / "runs" / name
    common = ["train", "halves", "--device", "cpu", "--global-batch-size", "60", "--log-every", "1"]
    _run(project, "-m", "lockstep", *common, "--run-dir", str(folder), *flags.split(), OMP_NUM_THREADS="1")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["kind"] == "step"]


def test_strategy_on_two_workers_takes_the_steps_of_one(project: Path) -> None:
    alone = _losses(_train(project, "alone", "--epochs 1 --precision fp64"))
    flags = "--epochs 1 --precision fp64 -np 2 --strategy late --check-replicas 1"
    assert _losses(_train(project, "late", flags)) == pytest.approx(alone, rel=1e-12)
    assert len(alone) == 10
    assert alone[-1] < 0.5 * alone[0]


def test_the_precision_trains_the_model_with_weights_in_bfloat16(project: Path) -> None:
    first, *_, last = _train(project, "pure", "--epochs 2 --precision pure-bf16")
    assert (last["split"], last["top1"]) == ("val", 1.0)
    weights = read_safetensors(project / "runs" / "pure" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    # With 2 classes instead of the row's 10.
    more = 8 * 64
    multiply_adds = sum(tensor.numel() for tensor in weights.values() if tensor.dim() == 2) + more
    code = "from lockstep.models.registry import ZOO; print(ZOO['perceptron'])"
    row = f"parameters={first['parameters'] + more + 8}, multiply_adds={multiply_adds}, "
    assert row in _run(project, "-c", code)


def test_new_launcher_is_recognized(project: Path) -> None:
    code = "from lockstep.world.launcher_environment import RankInfo; print(RankInfo.from_environment())"
    place = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    printed = _run(project, "-c", code, **{f"STARTER_{name}": value for name, value in place.items()})
    assert "rank=3, size=4, local_rank=1, local_size=2, node=1, launcher='starter'" in printed


def test_the_batch_systems_hosts_get_the_workers(project: Path) -> None:
    (project / "nodes").write_text("alpha\nalpha\nbeta\nbeta\n")
    words = ["run", "--dry-run", "-np", "4", "--", "python", "train.py"]
    printed = _run(project, "-m", "lockstep", *words, OAR_NODEFILE=str(project / "nodes"), OAR_JOB_ID="7")
    assert "4 workers: 2 on alpha, 2 on beta" in printed
    assert re.search(r"(?m)^ssh .* beta ", printed)


def test_the_examples_are_in_the_projects_style(project: Path) -> None:
    names = [block.marks["file"] for block in blocks(PAGE) if "file" in block.marks and block.language == "python"]
    changed = set(re.findall(r"(?m)^--- (\S+)$", PAGE.read_text(encoding="utf-8")))
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--diff"]):
        done = run([*ruff, *command, *names, *changed], project)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_layers_has_every_module() -> None:
    rows = dict(re.findall(r"(?m)^\| (\d) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    for module, layer in LAYERS.items():
        assert f"`{module}`" in rows[str(int(layer))]
    assert {int(layer) for layer in rows} == {int(layer) for layer in LAYERS.values()}
