"""`python benchmarks/gpu PART [DATA_DIR]`: see the docstring of `gpu`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import gpu  # noqa: E402
from gpu.suite import ROOT, Suite, children_find, find_cifar10  # noqa: E402


class Part(NamedTuple):
    """A part of the suite: what it does, how long it takes on an H100, and what of it only CUDA can run.

    Attributes:
        least: The least time that it needs, in seconds.
    """

    about: str
    minutes: float
    least: float
    run: Callable[[Suite, argparse.Namespace], None]
    needs_cuda: str = ""
    data: str = ""


def _check(suite: Suite, options: argparse.Namespace) -> None:
    suite.step("check", ["--only", *options.only] if options.only else [], most=suite.left())


def _speed(suite: Suite, options: argparse.Namespace) -> None:
    suite.step("limits", most=60.0)
    suite.step("resnet50", most=min(180.0, 0.6 * suite.left()))
    suite.step("resnet50", ["--benchmark"], most=min(110.0, 0.5 * suite.left()))
    suite.step("zoo", most=suite.left())


def _mnist(suite: Suite, options: argparse.Namespace) -> None:
    suite.step("epochs", ["mnist", str(_mnist_in(options.data) or options.data)], most=suite.left())


def _cifar10(suite: Suite, options: argparse.Namespace) -> None:
    folder = str(find_cifar10(options.data) or options.data)
    suite.step("cifar_fast", [folder], most=0.45 * suite.left())
    suite.step("epochs", ["cifar10", folder], most=0.5 * suite.left())
    suite.step("accuracy", [folder], most=suite.left())


def _peers(suite: Suite, options: argparse.Namespace) -> None:
    suite.step("peers", [str(options.data)] if options.data else [], most=suite.left())


def _jpeg(suite: Suite, options: argparse.Namespace) -> None:
    suite.step("jpeg", [str(options.data)], most=suite.left())


def _mnist_in(data: Path) -> Path | None:
    """Return the folder to pass as --data-dir for MNIST, or None if it has no MNIST."""
    return data if (data / "MNIST").is_dir() else None


PARTS = {
    "check": Part(
        "correctness: trainer, hvd, own loops, losses of workers",
        8,
        150.0,
        _check,
        "graphs, compiled training, two workers on one GPU, memory that ends, decoding",
    ),
    "speed": Part(
        "the GPU's limits, ResNet-50 beside a hand-written loop, all small networks",
        8,
        150.0,
        _speed,
        "compiled networks",
    ),
    "peers": Part(
        "hvd beside DDP, the observer's cost, the recipe beside airbench's script if DATA has it",
        5,
        60.0,
        _peers,
        "airbench's script",
    ),
    "mnist": Part("32 epochs of MNIST", 2, 60.0, _mnist, data="MNIST/"),
    "cifar10": Part(
        "CIFAR-10: 94 %, 32 epochs, accuracies",
        9,
        120.0,
        _cifar10,
        "compiled training, graphs",
        "CIFAR-10, original or as train/ and test/",
    ),
    "jpeg": Part(
        "decoding of photographs on the GPU", 2, 60.0, _jpeg, "Lockstep, --decode gpu", "a folder of photographs"
    ),
}


def main() -> int:
    options = _parse()
    if options.part == "list":
        for name, part in PARTS.items():
            needs = f"; DATA: {part.data}" if part.data else ""
            print(f"{name:8} {part.minutes:2g} min  {part.about}{needs}")
            print(f"{'':16}without CUDA: all at small sizes{part.needs_cuda and f', except {part.needs_cuda}'}")
        return 0
    children_find(options.device, options.stage if options.stage.is_dir() else None)
    os.environ["LOCKSTEP_GPU_SUITE_DEVICE"] = options.device
    if options.out:
        os.environ["LOCKSTEP_GPU_SUITE_OUT"] = str(options.out.resolve())
    suite = Suite(60 * options.minutes)
    parts = _parts_of(options.part, options.data)
    for index, name in enumerate(parts):
        suite.begin_part(reserved=sum(PARTS[later].least for later in parts[index + 1 :]))
        PARTS[name].run(suite, options)
    print("\nThe suite:")
    for outcome in suite.outcomes:
        print(f"  {outcome.name}: {outcome}")
    wrong = [each for each in suite.outcomes if each.name.startswith("check") and each.code not in (0, None)]
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks/gpu", description=gpu.__doc__, formatter_class=formatter)
    parser.add_argument("part", metavar="PART", help=f"{', '.join(PARTS)}, several, such as check+speed, all, or list")
    parser.add_argument("data", type=Path, nargs="?", help="folder with MNIST/ or cifar10/, or CIFAR-10 itself")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=("cuda", "cpu", "simgpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write records to OUT/records")
    parser.add_argument("--stage", type=Path, default=ROOT / "gpu-stage" / "site", help="folder of staged packages")
    parser.add_argument("--only", nargs="+", default=[], help="with check: run only these jobs")
    options = parser.parse_args()
    parts = options.part.split("+")
    if unknown := [part for part in parts if part not in PARTS and options.part not in ("all", "list")]:
        parser.error(f"{unknown[0]} is no part here; there are {', '.join(PARTS)}, and all of them: all")
    if options.data is None and (lacking := [part for part in parts if part in PARTS and PARTS[part].data]):
        parser.error(f"{lacking[0]} needs a folder with data: {PARTS[lacking[0]].data}")
    return options


def _parts_of(part: str, data: Path | None) -> list[str]:
    if part != "all":
        return part.split("+")
    parts = ["check", "speed", "peers"]
    if data is not None:
        parts += ["mnist"] * bool(_mnist_in(data)) + ["cifar10"] * bool(find_cifar10(data))
    return parts


if __name__ == "__main__":
    sys.exit(main())
