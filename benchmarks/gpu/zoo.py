"""How many images per second does each network for 32 x 32 images train on one GPU, plain and compiled?

Lockstep's loop runs on 32 x 32 noise in the GPU's memory: bf16, channels_last, batch 512, 30 steps after a warm-up of 4
steps and one epoch. All plain networks run first, by increasing work; then compiled ones, which take 20 to 60 s each,
while there is time. Networks that do not fit are left out and reported. A failure does not stop the others.
"""

from __future__ import annotations

import argparse
import time

from gpu.device import is_left_out, size, synchronize
from gpu.jobs import free_memory, noise, opened, quietly, recipe, warm_up
from gpu.recording import record
from lockstep.models.registry import ZOO
from lockstep.train.loop import train_epoch

BATCH, STEPS = size(512, 4), size(30, 2)
FIRST_COMPILED = ("resnet18", "cifar10-fast", "vgg16", "resnet50", "mobilenetv2")
PLAIN_SECONDS, COMPILED_SECONDS = size(10, 1), size(75, 1)  # needed to start another network


def names() -> list[str]:
    """Return the names of the networks for 32 x 32 color images, by increasing work."""
    fitting = {name: entry for name, entry in ZOO.items() if (entry.in_channels, entry.side) == (3, 32)}
    return sorted(fitting, key=lambda name: fitting[name].multiply_adds)


def rate(name: str, compiled: bool) -> dict[str, float]:
    """Return the images per second of one network, and the seconds of its warm-up."""
    data = noise(BATCH * STEPS, 32)
    config = recipe("cifar10", name, precision="bf16", batch_size=BATCH, compile=compiled, epochs=100, lr=0.001)
    with opened(config, data) as job:
        warmup = warm_up(job)
        with quietly():
            train_epoch(job)
            synchronize()
            start = time.perf_counter()
            train_epoch(job)
            synchronize()
            seconds = time.perf_counter() - start
    return {"images_per_second": BATCH * STEPS / seconds, "warmup_seconds": warmup}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    plain = options.names or names()
    compiled = [name for name in (*FIRST_COMPILED, *plain) if name in plain]
    if is_left_out("compiled networks"):
        compiled = []
    turns = [(name, False) for name in plain] + [(name, True) for name in dict.fromkeys(compiled)]
    for name, is_compiled in turns:
        way = "compiled" if is_compiled else "plain"
        if end - time.monotonic() < (COMPILED_SECONDS if is_compiled else PLAIN_SECONDS):
            print(f"{name}, {way}: left out, for lack of time", flush=True)
            continue
        try:
            figures = rate(name, is_compiled)
        except Exception as error:
            print(f"{name}, {way}: failed: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            record(f"zoo: {name}", way=way, failed=f"{type(error).__name__}: {error}")
        else:
            shown = f"{figures['images_per_second']:,.0f} images/s, warm-up {figures['warmup_seconds']:.1f} s"
            print(f"{name}, {way}: {shown}", flush=True)
            record(f"zoo: {name}", way=way, batch=BATCH, precision="bf16", channels_last=True, **figures)
        free_memory()


if __name__ == "__main__":
    main()
