"""An older script's command line and checkpoint, in `lockstep train` with two workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from attack import Attack
from commands import LOCKSTEP, Done, run

from lockstep.cli import main
from lockstep.files.jsonl import read_records
from lockstep.models import registry

OLD_WORDS = ["digits", "-a", "digits-net", "--b", "32", "-p", "10", "--epochs", "3", "--no-cuda", "--resume"]


def _old_file(path: Path, **extra: object) -> Path:
    """What the ImageNet examples write, of the network for the digits after two epochs."""
    torch.manual_seed(0)
    net = registry.build("digits-net", 10, 1, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    state = {f"module.{name}": tensor for name, tensor in net.state_dict().items()}
    content = {"epoch": 2, "arch": "digits-net", "state_dict": state, "best_prec1": 51.0}
    torch.save({**content, "optimizer": optimizer.state_dict(), **extra}, path)
    return path


def _train(*words: str, cwd: Path) -> Done:
    return run([*LOCKSTEP, "train", "-np", "2", *words], cwd)


def test_two_workers_go_on_from_an_old_file(tmp_path: Path) -> None:
    _old_file(tmp_path / "checkpoint.pth.tar")
    done = _train(*OLD_WORDS, "checkpoint.pth.tar", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "weights from checkpoint.pth.tar: 2 epochs finished, best top-1 51.00 %" in done.stdout
    assert "the optimizer starts without the file's state" in done.stdout
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert [r["epoch"] for r in records if r["kind"] == "epoch"] == [3, 3]
    assert records[0]["step"] == 2 * -(-1437 // 64)
    assert "--run-dir" in _train(*OLD_WORDS, "checkpoint.pth.tar", "--run-dir", "run", cwd=tmp_path).stderr


def test_a_hostile_file_stops_both_workers_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "owned"
    _old_file(tmp_path / "bad.pth", best_prec1=Attack(os.system, f"touch {marker}"))
    done = _train(*OLD_WORDS, "bad.pth", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 5
    assert "bad.pth: not loaded, and no code in it was run: it references posix.system" in done.stderr
    assert not marker.exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_old_files_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _old_file(Path("old.pth"))
    assert main(["train", "digits", "-e", "--resume", "old.pth"]) == 0
    line = capsys.readouterr().out
    assert "of 360 images right" in line
    assert main(["eval", "old.pth", "digits"]) == 0
    assert capsys.readouterr().out == line
    _old_file(Path("nameless.pth"), arch=None)
    assert main(["eval", "nameless.pth", "digits", "-a", "digits-net"]) == 0
    assert capsys.readouterr().out == line
    assert main(["eval", "nameless.pth", "digits"]) == 5
    assert "add -a NAME" in capsys.readouterr().err
    assert main(["eval", "old.pth"]) == 2
    assert "name the data set or folder" in capsys.readouterr().err
    assert main(["train", "digits", "-a", "mnist-net", "-e", "--resume", "old.pth"]) == 5
    assert "does not fit --arch mnist-net" in capsys.readouterr().err
    assert main(["train", "digits", "-e", "-r"]) == 2
    assert "no run of this data set and model in runs/" in capsys.readouterr().err
