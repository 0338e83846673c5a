"""`python benchmarks/gpu PART [DATA_DIR]`: see the docstring of `gpu`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import gpu  # noqa: E402
from gpu.suite import ROOT, Suite, children_find  # noqa: E402

PARTS = ("check", "speed", "mnist", "cifar10", "jpeg", "all")
CHECK_MODULES = ("check",)


def main() -> int:
    options = _parse()
    children_find(options.stage if options.stage.is_dir() else None)
    os.environ["LOCKSTEP_GPU_SUITE_DEVICE"] = options.device
    if options.out:
        os.environ["LOCKSTEP_GPU_SUITE_OUT"] = str(options.out.resolve())
    suite = Suite(60 * options.minutes)
    parts = _parts_of(options.part, options.data)
    for part, reserved in zip(parts, _reserve(parts), strict=True):
        {"check": _check, "speed": _speed, "mnist": _mnist, "cifar10": _cifar10, "jpeg": _jpeg}[part](
            suite, options, reserved
        )
    print("\nThe suite:")
    for outcome in suite.outcomes:
        print(f"  {outcome.name}: {outcome}")
    wrong = [each for each in suite.outcomes if each.name.startswith(CHECK_MODULES) and each.code not in (0, None)]
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks/gpu", description=gpu.__doc__, formatter_class=formatter)
    parser.add_argument("part", metavar="PART", help=f"{', '.join(PARTS)}, or several, such as check+speed")
    parser.add_argument("data", type=Path, nargs="?", help="folder with MNIST/ or cifar10/, or CIFAR-10 itself")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write records to OUT/records")
    parser.add_argument("--stage", type=Path, default=ROOT / "gpu-stage" / "site", help="folder of staged packages")
    parser.add_argument("--only", nargs="+", default=[], help="with check: run only these jobs")
    options = parser.parse_args()
    parts = options.part.split("+")
    if unknown := [part for part in parts if part not in PARTS or (part == "all" and len(parts) > 1)]:
        parser.error(f"{unknown[0]} is no part here; there are {', '.join(PARTS)}")
    if options.data is None and (lacking := [part for part in parts if part in ("mnist", "cifar10", "jpeg")]):
        parser.error(f"{lacking[0]} needs the folder with its data")
    return options


def _parts_of(part: str, data: Path | None) -> list[str]:
    if part != "all":
        return part.split("+")
    parts = ["check", "speed"]
    if data is not None:
        parts += ["mnist"] * bool(_mnist_in(data)) + ["cifar10"] * bool(_cifar10_in(data))
    return parts


def _reserve(parts: list[str]) -> list[float]:
    """Return, for each part, the seconds to reserve for the parts after it."""
    wanted = {"check": 150.0, "speed": 150.0, "mnist": 60.0, "cifar10": 120.0, "jpeg": 60.0}
    return [sum(wanted[later] for later in parts[index + 1 :]) for index in range(len(parts))]


def _check(suite: Suite, options: argparse.Namespace, reserved: float) -> None:
    suite.step("check", ["--only", *options.only] if options.only else [], most=suite.left() - reserved)


def _speed(suite: Suite, options: argparse.Namespace, reserved: float) -> None:
    suite.step("limits", most=min(60.0, suite.left() - reserved))
    suite.step("resnet50", most=min(180.0, 0.6 * (suite.left() - reserved)))
    suite.step("resnet50", ["--benchmark"], most=min(110.0, 0.5 * (suite.left() - reserved)))
    suite.step("zoo", most=suite.left() - reserved)


def _mnist(suite: Suite, options: argparse.Namespace, reserved: float) -> None:
    suite.step("epochs", ["mnist", str(_mnist_in(options.data) or options.data)], most=suite.left() - reserved)


def _cifar10(suite: Suite, options: argparse.Namespace, reserved: float) -> None:
    folder = str(_cifar10_in(options.data) or options.data)
    suite.step("cifar_fast", [folder], most=0.45 * (suite.left() - reserved))
    suite.step("epochs", ["cifar10", folder], most=0.5 * (suite.left() - reserved))
    suite.step("accuracy", [folder], most=suite.left() - reserved)


def _jpeg(suite: Suite, options: argparse.Namespace, reserved: float) -> None:
    suite.step("jpeg", [str(options.data)], most=suite.left() - reserved)


def _mnist_in(data: Path) -> Path | None:
    """Return the folder to pass as --data-dir for MNIST, or None if it has no MNIST."""
    return data if (data / "MNIST").is_dir() else None


def _cifar10_in(data: Path) -> Path | None:
    """Return the folder with CIFAR-10's train/ and test/, or None; unpack an archive to the temporary folder first."""
    archives = [data] if data.is_file() else [*data.glob("cifar10*.zip"), *data.glob("cifar10*.tar.*")]
    folders = [data, data / "cifar10"]
    for archive in archives:
        target = Path(tempfile.gettempdir(), f"lockstep-gpu-suite-{archive.name}.unpacked")
        if not target.is_dir():
            trusted: dict[str, Any] = {} if archive.suffix == ".zip" else {"filter": "data"}
            shutil.unpack_archive(archive, target, **trusted)
        folders += [target, target / "cifar10"]
    return next((each for each in folders if (each / "train").is_dir() and (each / "test").is_dir()), None)


if __name__ == "__main__":
    sys.exit(main())
