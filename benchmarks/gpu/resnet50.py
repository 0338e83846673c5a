"""How fast does Lockstep train ResNet-50 on one GPU, compared with a hand-written loop and the GPU's limits?

ResNet-50 on 224 x 224 noise in the GPU's memory; bf16 autocast, channels_last, SGD with momentum, batch 256. Lockstep's
loop is the real one, with metrics, NaN check and records, but without augmentation. The hand-written loop does index,
normalize, forward, backward and step, and reads the loss once per turn. A turn is 20 steps, with plain and then with
compiled networks. --benchmark starts with torch.backends.cudnn.benchmark on and measures plain networks only, in a
separate process, because cuDNN caches its choice for a shape. (Lockstep's trainer turns it on as well.) The images per
second are also given as fractions of the matrix rate and memory bandwidth measured before, in the same process.
Bar: Lockstep at least 0.97 of the hand-written loop, which competes twice to show the measurement noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median

import torch
import torch.nn.functional as F
from harness import Bar, Unit, Work
from torch import nn
from torchvision.models import resnet50

from gpu import limits, recording
from gpu.device import DEVICE, is_left_out, size, synchronize
from gpu.jobs import free_memory, noise, opened, quietly, recipe
from gpu.work import work_of
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.train.loop import train_epoch

BATCH, STEPS, SIDE = size(256, 2), size(20, 1), size(224, 64)
ROUNDS = size(5, 2)
BARS = {"Lockstep": Bar("at least", 0.97)}
COMPILING_SECONDS = 100.0  # to compile both contestants and run their turns


def by_hand(data: ImageData, compiled: bool) -> Work:
    model: nn.Module = resnet50(num_classes=1000).to(DEVICE).to(memory_format=torch.channels_last)
    step = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    assert isinstance(data.train, MemorySplit)
    pixels, labels = data.train.images, data.train.labels

    def turn() -> int:
        model.train()
        for chosen in torch.randperm(len(pixels), device=DEVICE).split(BATCH):
            images = pixels[chosen].to(memory_format=torch.channels_last).float().mul_(1 / 63.75).sub_(2.0)
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(step(images), labels[chosen])
            loss.backward()
            optimizer.step()
        loss.item()
        return len(pixels)

    return turn


def by_lockstep(data: ImageData, compiled: bool, stack: ExitStack) -> Work:
    config = recipe(
        "imagenet",
        precision="bf16",
        batch_size=BATCH,
        channels_last=True,
        compile=compiled,
        epochs=10_000,
        lr=0.01,
        lr_scaling="none",
        schedule="constant",
        warmup_epochs=0,
        flip=False,
    )
    job = stack.enter_context(opened(config, data, resnet50(num_classes=1000)))

    def turn() -> int:
        with quietly():
            train_epoch(job)
            synchronize()
        return len(data.train)

    return turn


def compete(name: str, works: Mapping[str, Work]) -> dict[str, float]:
    """Compare the contestants in turns; return images per second by name."""
    seen: dict[str, list[float]] = {each: [] for each in works}

    def noting(each: str, work: Work) -> Callable[[], int]:
        def turn() -> int:
            start = time.perf_counter()
            images = work()
            seen[each].append(images / (time.perf_counter() - start))
            return images

        return turn

    noted = {each: noting(each, work) for each, work in works.items()}
    recording.compare(f"resnet50: {name}", noted, BARS, Unit("images/s", per_second=True), ROUNDS)
    return {each: median(rates[1:]) for each, rates in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--benchmark", action="store_true", help="set cudnn.benchmark, and measure plain networks only")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    torch.backends.cudnn.benchmark = options.benchmark
    suffix = ", cudnn.benchmark" if options.benchmark else ""
    bounds = limits.measure()
    print(bounds, flush=True)
    data = noise(BATCH * STEPS, SIDE, classes=1000)
    needs = work_of(resnet50(num_classes=1000), 3, SIDE)
    with ExitStack() as stack:
        works = {
            "by hand": by_hand(data, False),
            "by hand, again": by_hand(data, False),
            "Lockstep": by_lockstep(data, False, stack),
        }
        show(compete(f"plain{suffix}", works), suffix, needs, bounds)
    if options.benchmark:
        return
    free_memory()
    if is_left_out("compiled"):
        return
    if end - time.monotonic() < COMPILING_SECONDS:
        print("compiled: left out, for lack of time", flush=True)
        return
    with ExitStack() as stack:
        works = {"by hand": by_hand(data, True), "Lockstep": by_lockstep(data, True, stack)}
        try:
            rates = compete("compiled", works)
        except Exception as error:  # for example, the image has no C compiler
            print(f"compiled: failed: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            return
        show(rates, ", compiled", needs, bounds)


def show(rates: Mapping[str, float], suffix: str, needs: tuple[float, float], bounds: limits.Limits) -> None:
    """Print and record rates as fractions of the limits."""
    by_matrix, by_memory = bounds.bf16_per_second / needs[0], bounds.bytes_per_second / needs[1]
    print(
        f"an image takes {needs[0] / 1e9:.1f} GFLOP: at most {by_matrix:,.0f} images/s by the matrix rate; and moves "
        f"{needs[1] / 1e6:.0f} MB, layer by layer: {by_memory:,.0f} images/s by the memory's rate",
        flush=True,
    )
    for name, rate in ((f"{each}{suffix}", rate) for each, rate in rates.items()):
        shares = {"of_matrix_rate": rate / by_matrix, "of_memory_rate": rate / by_memory}
        print(
            f"  {name}: {rate:,.0f} images/s, {shares['of_matrix_rate']:.1%} of the matrix rate, "
            f"{shares['of_memory_rate']:.1%} of the memory's by unfused layers",
            flush=True,
        )
        recording.record(
            "resnet50_limits", way=name, images_per_second=rate, **shares, work=list(needs), limits=bounds._asdict()
        )


if __name__ == "__main__":
    main()
