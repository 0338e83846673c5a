"""The examples for Horovod's API do what they say under every launcher."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import HOROVODRUN, MPICH, TORCHRUN, Command, own_environment, run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "horovod"
ALONE = (sys.executable,)
BY_HOROVODRUN = (*HOROVODRUN, "-np", "2", sys.executable)
CHANCE = 10.0  # per cent, of ten classes

pytest.importorskip("horovod.torch", reason="lockstep-horovod (compat/horovod) is not installed")


def printed_by(launcher: Command, script: Path, *words: str, folder: Path) -> str:
    """What a job prints, by whichever worker; without the prefix of its launcher."""
    done = run([*launcher, script, *words], folder, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\[\d+\]<stdout>:", "", done.stdout, flags=re.MULTILINE)


def accuracies(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) % right", printed)]


def epochs(printed: str) -> list[int]:
    return [int(number) for number in re.findall(r"^epoch (\d+)", printed, flags=re.MULTILINE)]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (BY_HOROVODRUN, ("--fp16-allreduce", "--gradient-predivide-factor", "2")),
        pytest.param(BY_HOROVODRUN, ("--use-adasum",), marks=pytest.mark.long),
        pytest.param((*MPICH, "-np", "2", sys.executable), (), marks=[pytest.mark.cold, pytest.mark.long]),
    ],
    ids=["fp16", "Adasum", "MPICH"],
)
def test_mnist_learns_under_every_launcher(command: Command, words: tuple[str, ...], tmp_path: Path) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    words = ("--epochs", "2", "--checkpoint", "digits.pt", *words)
    printed = printed_by(command, EXAMPLES / "mnist.py", *words, folder=tmp_path)
    assert epochs(printed) == [1, 2], "one worker says each line"
    assert accuracies(printed)[-1] > 5 * CHANCE
    saved = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert saved["epoch"] == 2
    assert all(torch.isfinite(weights).all() for weights in saved["model"].values())


def test_mnist_reads_the_original_files(tmp_path: Path) -> None:
    data = ROOT.parent / "shared" / "data" / "MNIST"
    if not data.is_dir():
        pytest.skip("the real images are not beside the project")
    code = f"""
import sys; sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path; from mnist import load_data
train, test = load_data(Path({str(data)!r}))
print([list(tensor.shape) for split in (train, test) for tensor in split.tensors])
print(train.tensors[1].bincount().tolist(), f"{{train.tensors[0].mean():.3f}} {{train.tensors[0].std():.3f}}")
"""
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.stdout.splitlines() == [
        "[[60000, 1, 28, 28], [60000], [10000, 1, 28, 28], [10000]]",
        "[5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949] 0.000 1.000",
    ]


def test_cifar10_continues_with_the_next_epoch_on_fewer_workers(tmp_path: Path) -> None:
    script = EXAMPLES / "cifar10.py"
    first = printed_by(BY_HOROVODRUN, script, "--epochs", "1", folder=tmp_path)
    second = printed_by(ALONE, script, "--epochs", "2", folder=tmp_path)
    assert (epochs(first), epochs(second)) == ([1], [2])
    assert accuracies(second)[0] > max(5 * CHANCE, accuracies(first)[0]), "it goes on, and does not begin anew"
    assert sorted(path.name for path in (tmp_path / "cifar10-checkpoints").iterdir()) == [
        "epoch-0001.pt",
        "epoch-0002.pt",
    ]


def test_imagenet_accumulates_goes_on_and_reports(tmp_path: Path) -> None:
    words = ("--model", "squeezenet1_1", "--batches-per-allreduce", "2", "--image-size", "32")
    script = EXAMPLES / "imagenet_resnet50.py"
    first = printed_by(ALONE, script, *words, "--epochs", "1", folder=tmp_path)
    second = printed_by(BY_HOROVODRUN, script, *words, "--epochs", "2", "--fp16-allreduce", folder=tmp_path)
    assert (epochs(first), epochs(second)) == ([1], [2])
    assert torch.load(tmp_path / "checkpoint-2.pt", weights_only=True)["epoch"] == 2
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))


def test_the_benchmark_adds_up_all_workers(tmp_path: Path) -> None:
    words = ("--model", "squeezenet1_1", "--batch-size", "2", "--iterations", "2", "--batches-per-iteration", "1")
    printed = printed_by(TORCHRUN, EXAMPLES / "synthetic_benchmark.py", *words, folder=tmp_path)
    one, both = (float(number) for number in re.findall(r": ([\d.]+) ±", printed))
    assert both > one > 0
    assert "in all, on 2" in printed


def test_elastic_mnist_learns_with_fixed_workers_too(tmp_path: Path) -> None:
    printed = printed_by(BY_HOROVODRUN, EXAMPLES / "elastic_mnist.py", "--epochs", "2", folder=tmp_path)
    assert epochs(printed) == [1, 2]
    assert accuracies(printed)[-1] > 5 * CHANCE
