"""How long do 32 epochs of MNIST or of CIFAR-10 take on one GPU?

Published for one A100: 499.8 s on MNIST, 522.3 s on CIFAR-10. The runs use Lockstep's recipes (mnist-net, ResNet-18),
first with larger batches, bf16 and channels_last, then, if there is time, unchanged. Times are given without and with
the evaluation after each epoch, and exclude loading the images.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from gpu import cifar
from gpu.device import ON_CUDA, size
from gpu.jobs import changed, few, free_memory, opened, recipe, run, warm_up
from gpu.recording import record
from lockstep.data.sets import ImageData
from lockstep.data.sources import torchvision_sets

EPOCHS = size(32, 1)
PUBLISHED = {"mnist": 499.8, "cifar10": 522.3}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {
        "batch 1,024, bf16": {"batch_size": 1024, "precision": "bf16", "lr": 0.05, "warmup_epochs": 2},
        "the recipe": {},
    },
    "cifar10": {
        "batch 512, bf16": {"batch_size": 512, "precision": "bf16", "warmup_epochs": 3},
        "the recipe": {},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(PUBLISHED))
    parser.add_argument("folder", type=Path, help="with MNIST/, or CIFAR-10's train/ and test/")
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    is_mnist = options.name == "mnist"
    data, name = (_mnist if is_mnist else cifar.load)(options.folder)
    data = data if ON_CUDA else few(data, 256)
    for way, settings in WAYS[options.name].items():
        config = changed(recipe(options.name), epochs=EPOCHS, **settings)
        guess = seconds_of_epoch(config, data) * EPOCHS
        if time.monotonic() + 1.3 * guess > end:
            print(f"{options.name}, {way}: left out, for it would take about {guess:.0f} s", flush=True)
            continue
        trained = run(config, data)
        free_memory()
        print(
            f"{options.name}, {EPOCHS} epochs, {way}: {trained.train_seconds:.1f} s of training, "
            f"{trained.whole_seconds:.1f} s with evaluations; top-1 {100 * trained.top1:.2f} % (published for one "
            f"A100: {PUBLISHED[options.name]} s); on {name}",
            flush=True,
        )
        facts = {"arch": config.model.arch, "epochs": EPOCHS, "published_seconds_on_a100": PUBLISHED[options.name]}
        record(f"epochs: {options.name}", way=way, **facts, data=name, settings=settings, **trained._asdict())


def _mnist(folder: Path) -> tuple[ImageData, str]:
    return torchvision_sets.load("mnist", folder, download=False), "MNIST"


def seconds_of_epoch(config: Any, data: ImageData) -> float:
    """Estimate the time of an epoch from some steps after a warm-up."""
    with opened(config, data) as job:
        warm_up(job)
        steps = min(30, job.steps_per_epoch)
        seconds = warm_up(job, steps) / steps * job.steps_per_epoch
    free_memory()
    return seconds


if __name__ == "__main__":
    main()
