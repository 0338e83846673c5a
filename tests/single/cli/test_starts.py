"""Starts of `lockstep train`: what `--dry-run` shows of them, and starts that are refused and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.models import registry


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_a_dry_run_prints_what_would_be_started(here: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main(["train", "-np", "2", flag, "--epochs", "3"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if " -m lockstep train" in line]
    assert len(commands) == 2
    assert all(line.endswith("-m lockstep train -np 2 --epochs 3") for line in commands)
    assert not list(here.iterdir())


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_only_a_launchers_first_worker_prints_and_none_trains(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    for field, value in {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{field}", str(value))
    assert main(["train", "--dry-run", "--max-steps", "1"]) == 0
    workers = "1 worker" if size == 1 else "2 workers"
    said = [f"# Open MPI has started {workers} for this command"]
    assert capsys.readouterr().out.splitlines() == ([] if rank else said)
    if rank == 0:
        assert main(["train", "--dry-run", "-np", "3"]) == 2
        assert f"-np 3, but Open MPI has started {size} workers" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize(("gpus", "workers"), [(0, 4), (1, 2)])
def test_lines_of_a_node_file_count_without_gpus(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    accelerators: Callable[..., None],
    gpus: int,
    workers: int,
) -> None:
    (here / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", "nodes")
    accelerators(count=gpus)
    assert main(["train", "digits", "--dry-run"]) == 0
    assert f"# {workers} workers: {workers // 2} on node1, {workers // 2} on node2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["-a", "nonet"], 2, "--arch nonet: unknown model"),
        (["cifar10", "-a", "resnet19"], 4, "cifar10 is missing from data"),
        (["images", "-a", "digits-net"], 2, "--arch digits-net cannot take images of shape [3, 12, 16]: "),
        (["--data", "nomodule:load"], 2, "no module 'nomodule' in the current folder"),
        (["images", "--rotate", "5", "--in-memory", "never"], 2, "--rotate"),
        (["images", "--in-memory", "never", "--decode", "gpu", "--device", "cpu"], 2, "runs on cpu"),
        (["--decode", "gpu"], 2, "--decode gpu: needs image files that are read during training, but digits has none"),
        (["images", "-a", "torchvision/resnet18", "-b", "13"], 2, "add --drop-last, or change --batch-size"),
        (["--freeze", "nolayer"], 2, "--freeze nolayer: no parameter matches"),
        (["empty"], 4, "empty"),
        (["--resume", "nowhere"], 5, "nowhere is not a checkpoint"),
        (["--pretrained", "nowhere.pt"], 5, "nowhere.pt"),
        (["--evaluate", "--resume", "nowhere"], 5, "nowhere is not a checkpoint"),
    ],
)
def test_a_start_that_cannot_be_is_refused(
    here: Path, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, hint: str
) -> None:
    (here / "empty" / "train").mkdir(parents=True)
    before = sorted(here.rglob("*"))
    assert main(["train", *words, "--no-download", "--run-dir", "run", "--epochs", "1"]) == code
    assert hint in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("file", "run folder file cannot be written: "),
        ("file/run", "run folder file/run cannot be written: "),
        ("loop", "run folder loop cannot be written: "),
        (os.fsdecode(b"run\xff"), "run folder run\\udcff: its name is not UTF-8"),
    ],
)
def test_a_run_folder_that_cannot_be_made_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], run: str, words: str
) -> None:
    (here / "file").touch()
    (here / "loop").symlink_to("loop")
    code = main(["train", "--run-dir", run, "--epochs", "1"])
    error = capsys.readouterr().err.encode(errors="backslashreplace").decode()  # pytest's workers send only UTF-8
    assert (code, words in error) == (2, True), error


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--resume", "run", "--start-epoch", "1", "--run-dir", "run"], "--start-epoch starts a new run"),
        (["--resume", "old.pth", "--run-dir", "run"], "contains checkpoints of an earlier run"),
    ],
)
def test_a_used_folder_is_refused_for_a_new_run(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    weights = registry.build("digits-net", 10, 1, 8).state_dict()
    torch.save({"epoch": 1, "arch": "digits-net", "state_dict": weights}, here / "old.pth")
    assert main(["train", "--max-steps", "2", "--run-dir", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["train", *words]) == 2
    assert hint in capsys.readouterr().err
