"""What `--dry-run` finds out about a start, and that it leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.models import registry
from lockstep.world import accelerator

DIGITS = ["# digits: 1,437 + 360 images, 10 classes", "# digits-net: 113,386 parameters"]


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_a_dry_run_names_data_and_model(here: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main(["train", "-np", "2", flag, "--epochs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == DIGITS
    commands = [line for line in lines if " -m lockstep train" in line]
    assert len(commands) == 2
    assert all(line.endswith("-m lockstep train -np 2 --epochs 3") for line in commands)
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["-a", "nonet"], 2, "--arch nonet: unknown model"),
        (["images", "-a", "digits-net"], 2, "--arch digits-net cannot take images of shape [3, 12, 16]: "),
        (["-a", "resnet18", "cifar10", "--no-download"], 4, "cifar10 is missing from data"),
        (["--data", "nomodule:load"], 2, "no module 'nomodule' in the current folder"),
        (["images", "--rotate", "5", "--in-memory", "never"], 2, "--rotate"),
        (["images", "--in-memory", "never", "--decode", "gpu", "--device", "cpu"], 2, "runs on cpu"),
        (["--decode", "gpu"], 2, "--decode gpu: needs image files that are read during training, but digits has none"),
        (["images", "-a", "torchvision/resnet18", "-b", "13"], 2, "add --drop-last, or change --batch-size"),
        (["empty"], 4, "empty"),
        (["--resume", "nowhere"], 5, "nowhere is not a checkpoint"),
        (["--pretrained", "nowhere.pt"], 5, "nowhere.pt"),
        (["--evaluate", "--resume", "nowhere"], 5, "nowhere is not a checkpoint"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    here: Path, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, hint: str
) -> None:
    (here / "empty" / "train").mkdir(parents=True)
    before = sorted(here.rglob("*"))
    for flags in ([], ["--dry-run"]):
        assert main(["train", *words, *flags, "--run-dir", "run", "--epochs", "1"]) == code
        assert hint in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_a_dry_run_checks_the_shares_of_all_workers(
    here: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "images", "-a", "torchvision/resnet18", "-np", "2", "--dry-run", "-b"]
    assert main([*words, "19"]) == 2
    assert "40 images in global batches of 38 = 19 per worker × 2 workers; add --drop-last" in capsys.readouterr().err
    assert main([*words, "13"]) == 0


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("file", "run folder file cannot be written: "),
        ("file/run", "run folder file/run cannot be written: "),
        ("loop", "run folder loop cannot be written: "),
        (os.fsdecode(b"run\xff"), "run folder run\\udcff: its name is not UTF-8"),
    ],
)
def test_a_dry_run_refuses_a_run_folder_that_cannot_be_made(
    here: Path, capsys: pytest.CaptureFixture[str], run: str, words: str
) -> None:
    (here / "file").touch()
    (here / "loop").symlink_to("loop")
    for flags in ([], ["--dry-run"]):
        code = main(["train", *flags, "--run-dir", run, "--epochs", "1"])
        error = capsys.readouterr().err.encode(errors="backslashreplace").decode()  # pytest's workers send only UTF-8
        assert (code, words in error) == (2, True), error


def test_a_dry_run_checks_the_checkpoint_that_is_gone_on_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--max-steps", "2", "--run-dir", "run", "--quiet"]) == 0
    before = sorted(here.rglob("*"))
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [*DIGITS, "# resumes from run/checkpoints/step-00000002, after step 2"]
    assert main(["train", "--evaluate", "--resume", "run", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("# evaluates run: 113,386 parameters, 10 classes\n")
    assert main(["train", "--resume", "run", "--seed", "3", "--dry-run"]) == 5
    assert "it was made with --seed 0, not 3" in capsys.readouterr().err
    assert main(["train", "--run-dir", "run", "--dry-run"]) == 2
    assert "contains checkpoints of an earlier run" in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_a_set_that_a_start_fetches_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cifar10", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("# cifar10 is not in data; the first worker of each node downloads it\n")
    assert main(["train", "cifar10", "-a", "resnet19", "--dry-run"]) == 2
    assert "did you mean resnet18?" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_launchers_first_worker_alone_checks_and_none_trains(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    for field, value in {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{field}", str(value))
    assert main(["train", "--dry-run", "--max-steps", "1"]) == 0
    workers = "1 worker" if size == 1 else "2 workers"
    said = [*DIGITS, f"# Open MPI has started {workers} for this command"]
    assert capsys.readouterr().out.splitlines() == ([] if rank else said)
    if rank == 0:
        assert main(["train", "--dry-run", "-np", "3"]) == 2
        assert f"-np 3, but Open MPI has started {size} workers" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--resume", "run", "--start-epoch", "1", "--run-dir", "run"], "--start-epoch starts a new run"),
        (["--resume", "old.pth", "--run-dir", "run"], "contains checkpoints of an earlier run"),
    ],
)
def test_a_dry_run_refuses_a_used_folder_for_a_new_run(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    weights = registry.build("digits-net", 10, 1, 8).state_dict()
    torch.save({"epoch": 1, "arch": "digits-net", "state_dict": weights}, here / "old.pth")
    assert main(["train", "--max-steps", "2", "--run-dir", "run", "--quiet"]) == 0
    capsys.readouterr()
    for flags in ([], ["--dry-run"]):
        assert main(["train", *words, *flags]) == 2
        assert hint in capsys.readouterr().err


def test_a_dry_run_accepts_a_used_folder_for_a_resume(here: Path) -> None:
    assert main(["train", "--epochs", "1", "--run-dir", "run", "--quiet"]) == 0
    assert (
        main(["train", "--epochs", "2", "--resume", "run", "--start-epoch", "1", "--run-dir", "run", "--dry-run"]) == 0
    )


NORM = """import torch

class Activated(torch.nn.BatchNorm2d):
    pass

def net(num_classes):
    return torch.nn.Sequential(Activated(3), torch.nn.Flatten(), torch.nn.Linear(3072, num_classes))

def grey(num_classes):
    return torch.nn.Sequential(Activated(1), torch.nn.Flatten(), torch.nn.Linear(64, num_classes))
"""


@pytest.mark.parametrize("words", [["digits", "--model", "activated:grey"], ["cifar10", "--model", "activated:net"]])
def test_a_dry_run_refuses_norms_that_workers_cannot_synchronize(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (here / "activated.py").write_text(NORM)
    assert main(["train", *words, "-np", "2", "--sync-bn", "--dry-run"]) == 2
    assert "--sync-bn cannot replace Activated" in capsys.readouterr().err
    assert main(["train", *words, "-np", "1", "--sync-bn", "--dry-run"]) == 0


def test_a_dry_run_checks_the_workers_of_manual_nodes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["--dist-url", "tcp://127.0.0.1:29400", "--world-size", "2", "--rank", "0"]
    assert main(["train", *nodes, "--global-batch-size", "1", "--dry-run"]) == 2
    assert "less than one sample for each of 2 workers" in capsys.readouterr().err


def test_a_dry_run_checks_frozen_names_without_the_data_set(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cifar10", "--freeze", "nolayer", "--dry-run"]) == 2
    assert "--freeze nolayer: no parameter matches" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "workers"), [(0, 4), (1, 2)])
def test_lines_of_a_node_file_count_without_gpus(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpus: int, workers: int
) -> None:
    (here / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    monkeypatch.setenv("PBS_JOBID", "7")
    monkeypatch.setenv("PBS_NODEFILE", "nodes")
    monkeypatch.setattr(accelerator, "count", lambda: gpus)
    assert main(["train", "digits", "--dry-run"]) == 0
    assert f"# {workers} workers: {workers // 2} on node1, {workers // 2} on node2" in capsys.readouterr().out
