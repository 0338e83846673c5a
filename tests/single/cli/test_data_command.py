"""`lockstep data`: its actions as a user types them, and what it says of wrong words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.cli.data import ACTIONS


def test_help_lists_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {action} " in printed for action in ACTIONS)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["frobnicate"], "must be one of get, pack, verify, prepare"),
        (["pack", "nowhere", "out"], "nowhere is not a folder"),
        (["pack", "images", "images/out"], "choose another OUT"),
        (["pack", "images", "out", "--shortside", "8"], "--short-side"),
        (["pack", "images", "out", "--short-side", "0"], "--short-side 0: must be at least 1"),
        (["pack", "images", "out", "--bits", "40"], "--bits 40: must be between 1 and 31"),
        (["pack", "images", "out", "--shard-mb", "0"], "--shard-mb 0: must be at least 1"),
        (["pack", "images", "out", "-j", "0"], "-j 0: jobs must be at least 1, or auto"),
        (["verify", "nowhere"], "pass a folder with train/ and val/, or a pack"),
        (["verify", "images", "-j", "many"], "auto"),
        (["prepare", "mnist", "a", "b", "c", "d"], "imagenet"),
        (["prepare", "imagenet", "a.tar", "b.tar", "c.tar.gz", "d"], "training archive a.tar not found"),
    ],
)
def test_wrong_arguments_name_the_fix(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    assert main(["data", *words]) != 0
    assert hint in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["images"]


def test_a_folder_is_packed_described_verified_and_trained(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "pack", "images", "packed", "-j", "1"]) == 0
    assert "packed: 40 + 10 images, 2 classes, 2 files" in capsys.readouterr().out
    assert main(["data", "pack", "images", "packed", "-j", "1"]) == 2
    assert "OUT packed already exists" in capsys.readouterr().err
    for source, what in (("packed", "a pack of images"), ("images", "a folder of images")):
        assert main(["data", "verify", source, "-j", "1"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{source}: {what}, 2 classes: blue, red\n")
        assert "PNG 40" in printed
        assert printed.endswith(f"{source}: none of 50 images is damaged\n")
    for source in ("images", "packed"):
        words = [source, "-a", "cifar-small", "-b", "10", "--epochs", "1", "--lr", "0.01", "--run-dir", f"run-{source}"]
        assert main(["train", *words]) == 0
    theirs, ours = (load_file(f"run-{source}/model.safetensors") for source in ("images", "packed"))
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    capsys.readouterr()

    shard = Path("packed/val/val-000000.tar")
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    assert main(["data", "verify", "packed", "-j", "1"]) == 4
    printed = capsys.readouterr()
    assert "\npacked/val/val-000000.tar!blue/000.png has changed" in printed.out
    assert "1 damaged, listed above" in printed.err
    shard.write_bytes(content[:-1])
    assert main(["train", "packed"]) == 4
    assert "val-000000.tar has" in capsys.readouterr().err


def test_left_out_images_are_listed(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("images/train/red/004.png").write_bytes(b"no image")
    words = ["data", "pack", "images", "packed", "--short-side", "8", "-j", "1"]
    assert main(words) == 4
    assert "images/train/red/004.png cannot be decoded" in capsys.readouterr().err
    assert main([*words[:3], "other", *words[4:], "--skip-corrupt"]) == 0
    printed = capsys.readouterr().out
    assert "skipped: images/train/red/004.png" in printed
    assert "39 + 10 images" in printed
