"""How many images per second do Lockstep and its peers train, on the same network, images, batch and optimizer?

    python benchmarks/throughput.py DATA_DIR [CASE ...] [--workers 1 2] [--starts 3] [--rounds 4]

DATA_DIR contains MNIST in torchvision's layout, `cifar10/` with images in class folders, and `imagenet-sample/`; pass
only CASEs whose data is available. The cases are those of `peers/cases.py`: the examples' network on MNIST, cifar-small
and resnet18 on CIFAR-10, and torchvision's ResNet-18 on photographs of 224 x 224. The peers are a hand-written loop
with DistributedDataParallel, Hugging Face Accelerate and Lightning Fabric, each with its own batches (torchvision's
data sets in a DataLoader with one loader process) and with Lockstep's batches. Lockstep's images and weights are in
channels_last, as in its recipes; another contestant has them contiguous, like the peers. Every contestant is a separate
job, with the same number of threads; a turn is one epoch of its training loop. All jobs are started several times,
because memory placement makes a program up to 10 % faster or slower than at its last start. Ratios are relative
to Lockstep: below 1, the peer is slower.
Bars: every peer's median ratio is at most 1/0.98, and its 95 % interval reaches 1.00; on MNIST with a peer's own
batches, it is at most 1/1.2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from contestants import contestants
from environments import PEERS, python_with, torchrun
from harness import Bar, Turn, Unit, conclude, existing_folder, measure, positive, rounds

from lockstep.config.schema import DataConfig
from lockstep.data.sets import MemorySplit
from lockstep.data.sources import image_folder

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from cases import CASES

CONTIGUOUS = "Lockstep, contiguous"
PARITY = Bar("at most", 1 / 0.98, reaches=1.0)
OWN_MNIST = Bar("at most", 1 / 1.2)
SCRIPTS = {"DDP loop": "ddp_loop.py", "Accelerate": "accelerate_loop.py", "Fabric": "fabric_loop.py"}


def commands(name: str, folder: Path, workers: int) -> dict[str, list[str]]:
    """Return the command of each contestant's job."""
    ours = [sys.executable, "-m", "lockstep", "run", "-np", str(workers), "--log-dir", str(folder / "logs")]
    job = [*ours, "--", sys.executable, "lockstep_job.py", name, str(folder), "lockstep"]
    found = {"Lockstep": job, CONTIGUOUS: [*job, "--contiguous"]}
    for batches, source in (("own", "its own"), ("lockstep", "Lockstep's")):
        for peer, packages in PEERS.items():
            launch = torchrun(python_with(*packages), workers)
            found[f"{peer}, {source} batches"] = [*launch, SCRIPTS[peer], name, str(folder), batches]
    return found


def bar(name: str, title: str) -> Bar:
    return OWN_MNIST if name == "mnist" and "its own" in title else PARITY


def prepare(source: Path, folder: Path) -> None:
    """Link or convert the images to the layout in `folder` that every contestant expects."""
    for there, here in (("MNIST", "MNIST"), ("imagenet-sample", "photographs")):
        if (source / there).is_dir():
            (folder / here).symlink_to((source / there).resolve())
    if (source / "cifar10").is_dir():
        train = image_folder.load(source / "cifar10", DataConfig(dataset=str(source / "cifar10"))).train
        assert isinstance(train, MemorySplit)
        np.savez(folder / "cifar10.npz", images=train.images.permute(0, 2, 3, 1).numpy(), labels=train.labels.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=existing_folder)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--starts", type=positive, default=3)
    parser.add_argument("--rounds", type=rounds, default=4, help="rounds after each start")
    given = parser.parse_args()
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; choose from {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(given.data_dir, folder)
        for name in given.cases or CASES:
            for workers in given.workers:
                jobs = commands(name, folder, workers)
                turns: dict[str, list[Turn]] = {job: [] for job in jobs}
                for _ in range(given.starts):
                    with contestants(jobs, workers) as works:
                        for job, taken in measure(works, given.rounds).items():
                            turns[job] += taken
                bars = {job: bar(name, job) for job in jobs if "batches" in job}
                title = f"throughput: {name}, {workers} worker{'s' if workers > 1 else ''}"
                conclude(title, turns, bars, Unit("images/s", per_second=True))


if __name__ == "__main__":
    main()
