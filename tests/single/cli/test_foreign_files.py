"""Files of other kinds where a command takes a checkpoint or an image: named, refused, and never waited for."""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import LOCKSTEP, run
from torch import nn

from lockstep.cli import main

# What torch, NumPy or Pillow advise where a file is not one they know, and what their objects are called.
UNSAFE = re.compile(r"weights_only|allow_pickle|unsafe|trusted source|arbitrary code|0x[0-9a-f]{6}|Traceback", re.I)


def _script(path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(str(path))


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "a.py")


def _half(path: Path) -> None:
    torch.save({"weight": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])


FOREIGN: dict[str, Callable[[Path], object]] = {
    "README.md": lambda path: path.write_text("# Weights\n\nof a network\n"),
    "script.pt": _script,
    "zip.pth": _zip,
    "tar.pth": _tar,
    "half.pth": _half,
    "empty.pt": lambda path: path.write_bytes(b""),
    "pickle.pt": lambda path: path.write_bytes(b"\x80\x02}q\x00."),
    "text.safetensors": lambda path: path.write_text("# Weights\n"),
    "locked.pth": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.jit
def test_no_command_repeats_advice_against_safety(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FOREIGN[name](Path(name))
    for words in (
        ["eval", name],
        ["eval", name, "digits", "-a", "digits-net"],
        ["predict", name, "x.png"],
        ["export", name, "-o", "x.safetensors"],
        ["train", "digits", "--pretrained", name],
        ["train", "digits", "--resume", name],
        ["train", "digits", "-e", "--resume", name],
    ):
        assert main(words) == 5, words
        said = capsys.readouterr().err
        assert name in said, words
        assert not UNSAFE.search(said), (words, said)
    assert os.listdir() == [name]


def test_a_damaged_index_of_a_pack_repeats_none_either(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "pack", str(folder), "packed"]) == 0
    index = Path("packed/train/index.npy")
    for content in (b"no array at all", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', ", b""):
        index.write_bytes(content)
        assert main(["train", "packed", "--max-steps", "1"]) == 4
        said = capsys.readouterr().err
        assert "packed/train/index.npy cannot be read (it is damaged); copy it again" in said
        assert not UNSAFE.search(said)
    index.unlink()
    assert main(["train", "packed", "--max-steps", "1"]) == 4
    assert "index.npy cannot be read (No such file or directory)" in capsys.readouterr().err


def test_predict_explains_a_bad_image_without_training_flags(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--max-steps", "1", "--run-dir", "run"]) == 0
    Path("text.jpg").write_text("no image")
    Path("folder.png").mkdir()
    for name, reason in (
        ("missing.jpg", "missing.jpg cannot be read (No such file or directory)"),
        ("text.jpg", "text.jpg cannot be decoded (it is not JPEG, PNG,"),
        ("folder.png", "folder.png has no images (.jpg "),
    ):
        assert main(["predict", "run", name]) == 4
        said = capsys.readouterr().err
        assert reason in said
        assert "--skip-corrupt" not in said
        assert not UNSAFE.search(said)


def test_damaged_image_is_named_with_the_flag_that_skips_it(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = folder / "train" / "red" / "004.png"
    spoiled.write_text("no image")
    for way in ("always", "never"):
        flags = ["--in-memory", way, "--image-size", "32", "-j", "0", "-b", "40"]
        assert main(["train", str(folder), "-a", "cifar-small", *flags]) == 4
        said = capsys.readouterr().err
        assert f"{spoiled} cannot be decoded (it is not JPEG," in said
        assert "skip such files with --skip-corrupt" in said
        assert not UNSAFE.search(said)
    assert main(["data", "verify", str(folder), "-j", "1"]) == 4
    assert f"{spoiled} cannot be decoded (it is not JPEG," in capsys.readouterr().out


def test_a_pipe_is_never_waited_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("model.safetensors", "old.pth", "image.png", "run/model.safetensors"):
        os.mkfifo(tmp_path / name)
    done = run([*LOCKSTEP, "train", "digits", "--max-steps", "1", "--run-dir", "digits"], tmp_path)
    assert done.returncode == 0, done.stderr
    for words, code in (
        (["eval", "model.safetensors"], 5),
        (["eval", "run"], 5),
        (["eval", "old.pth", "digits"], 5),
        (["predict", "model.safetensors", "image.png"], 5),
        (["predict", "digits", "image.png"], 4),
        (["export", "run", "-o", "net.pt2"], 5),
        (["train", "digits", "--pretrained", "run", "--max-steps", "1"], 5),
        (["train", "digits", "--pretrained", "old.pth", "--max-steps", "1"], 5),
        (["train", "digits", "--resume", "old.pth", "--max-steps", "1"], 5),
    ):
        done = run([*LOCKSTEP, *words], tmp_path, timeout=60)
        assert done.returncode == code, (words, done.stderr)
        assert "Traceback" not in done.stderr
    (tmp_path / "digits" / "config.yaml").unlink()
    os.mkfifo(tmp_path / "digits" / "config.yaml")
    words = ["train", "digits", "--max-steps", "2", "--run-dir", "digits", "--resume", "auto"]
    done = run([*LOCKSTEP, *words], tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "digits" / "config.yaml").is_file()
    (folder / "train" / "red" / "000.png").unlink()
    os.mkfifo(folder / "train" / "red" / "000.png")
    for words in (["data", "verify", folder], ["data", "pack", folder, "packed"]):
        done = run([*LOCKSTEP, *words, "-j", "1"], tmp_path, timeout=60)
        assert done.returncode == 4, (words, done.stderr)
        assert "it is not a regular file" in done.stdout + done.stderr


def test_names_of_any_bytes_end_no_command_and_steer_no_terminal(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"red \x1b]0;x\x07\xff\xe2\x80\xae\nlockstep: error: |<b>")
    for split in ("train", "val"):
        (folder / split / "red").rename(folder / split / odd)
        (folder / split / odd / "001.png").write_text("no image")
    common = ["images", "-a", "cifar-small", "-b", "10", "--epochs", "1", "--lr", "0.01", "-j", "0", "--skip-corrupt"]
    said = []
    for words, code in (
        (["train", *common, "--run-dir", "memory"], 0),
        (["train", *common, "--run-dir", "stream", "--in-memory", "never", "--image-size", "16"], 0),
        (["train", *common[:-1], "--run-dir", "none"], 4),
        (["eval", "stream", "images", "--skip-corrupt", "-j", "0"], 0),
        (["predict", "memory", str(folder / "val" / odd / "000.png")], 0),
        (["data", "verify", "images", "-j", "1"], 4),
        (["data", "pack", "images", "packed", "-j", "1", "--short-side", "8", "--skip-corrupt"], 0),
        (["data", "verify", "packed", "-j", "1"], 0),
        (["report", "memory", "-o", "report"], 0),
        (["watch", "--once", "memory"], 0),
    ):
        assert main(words) == code, words
        printed = capsys.readouterr()
        said.append(printed.out + printed.err)
        assert [sign for sign in said[-1] if not sign.isprintable() and sign not in "\n\t"] == [], words
    assert sum("left out" in text or "skipped" in text for text in said) >= 4
    lines = [line for text in said for line in text.splitlines()]
    assert [line for line in lines if line.startswith("lockstep: error: |")] == []
    assert "red \\x1b]0;x\\x07" in Path("stream/logs/worker-0.log").read_text()
