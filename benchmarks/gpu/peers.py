"""How fast is Lockstep beside others on one GPU: hvd beside DDP, the observer's cost, the recipe beside airbench?

`hvd`: a step of ResNet-18 with hvd.DistributedOptimizer and with DistributedDataParallel, both in a group of one, in
turns. `observer`: the same plain script under `lockstep run`, with and without --no-observe, in turns. `airbench`: if
the data folder has AIRBENCH, it runs on the same images as the recipe cifar10-fast, one after the other; its script is
at github.com/KellerJordan/cifar10-airbench, and is not part of Lockstep.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Bar, Unit, Work, interleave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from gpu import cifar
from gpu.device import DEVICE, is_left_out, size, synchronize
from gpu.jobs import recipe, run
from gpu.recording import compare, record
from gpu.suite import find_cifar10
from lockstep import hvd
from lockstep.data.sets import ImageData, MemorySplit

AIRBENCH = "airbench94_muon.py"
ROUNDS, STEPS, BATCH, SIDE = size(15, 2), size(30, 2), size(32, 2), size(224, 32)
SCRIPT = """
import sys, time, torch
from torchvision.models import resnet18
device, batch, side, steps = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
model = resnet18().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(batch * 4, 3, side, side), torch.randint(0, 1000, (batch * 4,)))
loader = torch.utils.data.DataLoader(data, batch)
for turn in range(2):
    start = time.perf_counter()
    for _ in range(steps // 4 + 1):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
    loss.item()
print("seconds", time.perf_counter() - start)
"""


def _turn(model: nn.Module, optimizer: torch.optim.Optimizer) -> Work:
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
    labels = torch.randint(0, 1000, (BATCH,), device=DEVICE)

    def turn() -> int:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        synchronize()
        return STEPS

    return turn


def compare_hvd_and_ddp() -> None:
    hvd.init()
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    ours = resnet18().to(DEVICE)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    sgd = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (ours, theirs)]
    contestants = {
        "DDP": _turn(theirs, sgd[1]),
        "hvd.DistributedOptimizer": _turn(ours, hvd.DistributedOptimizer(sgd[0], ours.named_parameters())),
    }
    bars = {"hvd.DistributedOptimizer": Bar("at most", 1.02)}
    compare("peers: hvd beside DDP, one worker", contestants, bars, Unit("ms per step", 1e3), ROUNDS)
    hvd.shutdown()
    dist.destroy_process_group()


def measure_the_observer(rounds: int) -> None:
    """Print and record the ratio of the script's seconds with the observer to those without."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        script = [sys.executable, "script.py", DEVICE.type, *map(str, (BATCH, SIDE, STEPS))]

        def seconds(*flags: str) -> float:
            words = [sys.executable, "-m", "lockstep", "run", "-np", "1", *flags, "--", *script]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
            return float(done.stdout.split()[-1])

        turns = interleave({"plain": lambda: seconds("--no-observe"), "observed": seconds}, rounds)
    ratio = median(a / b for a, b in zip(turns["observed"], turns["plain"], strict=True))
    print(f"observer: {ratio:.3f} of the seconds without it, over {rounds} rounds", flush=True)
    record("peers: observer", ratio=ratio, turns=turns, batch=BATCH, side=SIDE)


def beside_airbench(script: Path, folder: Path, seconds: float) -> None:
    """Run the script and the recipe on the same images; record both, and what the script printed at its end."""
    data, name = cifar.load(folder)
    trained = [run(recipe("cifar10-fast", seed=seed), data) for seed in range(3)]
    with tempfile.TemporaryDirectory() as place:
        _write_tensors(data, Path(place, "cifar10"))
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, str(script.resolve())], cwd=place, capture_output=True, text=True, timeout=seconds
            )
            said = done.stdout if done.returncode == 0 else done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        whole = time.perf_counter() - start
    own, top1 = median(each.train_seconds for each in trained), mean(each.top1 for each in trained)
    print(f"the recipe: {100 * top1:.2f} % in {own:.2f} s; {AIRBENCH}, in {whole:.0f} s:\n{said[-1500:]}", flush=True)
    runs = re.findall(r"^\|\s+\S+\s+\|.*", said, re.MULTILINE)
    record("peers: airbench", data=name, recipe_top1=top1, recipe_seconds=own, printed=(runs or said.splitlines())[-8:])


def _write_tensors(data: ImageData, folder: Path) -> None:
    """Write the images as airbench reads them: uint8 [N, 32, 32, 3]."""
    folder.mkdir()
    for name, split in (("train", data.train), ("test", data.val)):
        assert isinstance(split, MemorySplit)
        images = split.images.cpu().permute(0, 2, 3, 1).contiguous()
        torch.save(
            {"images": images, "labels": split.labels.cpu(), "classes": list(data.classes)}, folder / f"{name}.pt"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help=f"with CIFAR-10 and {AIRBENCH}")
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    compare_hvd_and_ddp()
    measure_the_observer(size(5, 2))
    if is_left_out(AIRBENCH):
        return
    script, folder = (options.folder / AIRBENCH, find_cifar10(options.folder)) if options.folder else (None, None)
    if not (script and script.is_file() and folder):
        print(f"{AIRBENCH}: left out, it or CIFAR-10 is missing", flush=True)
    else:
        beside_airbench(script, folder, end - time.monotonic())


if __name__ == "__main__":
    main()
