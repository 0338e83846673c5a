"""How accurate does each network for small images get on CIFAR-10 in a few epochs on one GPU, and how fast?

ResNet-18 runs first, then the other networks by increasing work, or only those named on the command line. Networks that
do not fit into the time are left out and reported. Each is trained with the recipe cifar10 in bf16 and is one record:
accuracy, seconds of training, images per second. Expect accuracies below the quoted ones, which take 200 epochs instead
of 15; JPEG copies of the images lower them further.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from gpu import cifar
from gpu.device import ON_CUDA, size
from gpu.epochs import seconds_of_epoch
from gpu.jobs import few, free_memory, recipe, run
from gpu.recording import record
from gpu.zoo import names

FIRST = "resnet18"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--epochs", type=int, default=size(15, 1))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    data, source = cifar.load(options.folder)
    data = data if ON_CUDA else few(data, 64)
    others = [name for name in names() if name not in (FIRST, "cifar10-fast")]
    for name in options.names or [FIRST, *others]:
        try:
            config = recipe("cifar10", name, precision="bf16", epochs=options.epochs)
            if time.monotonic() + 1.3 * options.epochs * seconds_of_epoch(config, data) > end:
                print(f"{name}: left out, for lack of time", flush=True)
                continue
            trained = run(config, data)
        except Exception as error:
            print(f"{name}: failed: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            continue
        print(
            f"{name}: top-1 {100 * trained.top1:.2f} % after {options.epochs} epochs, {trained.train_seconds:.1f} s of "
            f"training, {trained.images_per_second:,.0f} images/s; on {source}",
            flush=True,
        )
        record(f"accuracy: {name}", data=source, epochs=options.epochs, precision="bf16", **trained._asdict())
        free_memory()


if __name__ == "__main__":
    main()
