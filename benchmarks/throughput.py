"""How many images a second are trained, by Lockstep and by its peers, on the same network, images, batch and optimizer?

    python benchmarks/throughput.py DATA_DIR [--workers 1 2] [--rounds 11] [CASE ...]

DATA_DIR holds MNIST as torchvision keeps it, `cifar10/` as images in class folders and `imagenet-sample/` (ask only
for CASEs whose data there is); the cases are those of `peers/cases.py`: the examples' network on MNIST, cifar-small and
resnet18 on CIFAR-10, torchvision's ResNet-18 on photographs of 224 x 224. Peers: a loop with DistributedDataParallel
written by hand, Hugging Face Accelerate and Lightning Fabric, each with the batches of torchvision's data sets in a
DataLoader (its own, with one loader process), and each with Lockstep's batches. Lockstep's images and weights are in
channels_last, as its recipes have them; once more, they are contiguous as the peers' are. Every contestant is a job of
its own, all with the same number of threads; a turn is one epoch of its training loop. Ratios are to Lockstep: below 1,
the peer is slower.
Bars: no peer's median ratio above 1/0.98, its 95 % interval reaching 1.00; on MNIST with its own batches at most 1/1.2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from contestants import contestants
from environments import python_with
from harness import Bar, Unit, compare, existing_folder

from lockstep.config.schema import DataConfig
from lockstep.data.sets import MemorySplit
from lockstep.data.sources import image_folder

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from cases import CASES

CONTIGUOUS = "Lockstep, contiguous"
PARITY = Bar("at most", 1 / 0.98, reaches=1.0)
OWN_MNIST = Bar("at most", 1 / 1.2)
PEERS = {
    "DDP loop": ("ddp_loop.py",),
    "Accelerate": ("accelerate_loop.py", "accelerate"),
    "Fabric": ("fabric_loop.py", "lightning-fabric"),
}


def commands(name: str, folder: Path, workers: int) -> dict[str, list[str]]:
    """What starts each contestant's job."""
    ours = [sys.executable, "-m", "lockstep", "run", "-np", str(workers), "--log-dir", str(folder / "logs")]
    job = [*ours, "--", sys.executable, "lockstep_job.py", name, str(folder), "lockstep"]
    found = {"Lockstep": job, CONTIGUOUS: [*job, "--contiguous"]}
    for batches, whose in (("own", "its own"), ("lockstep", "Lockstep's")):
        for peer, (script, *packages) in PEERS.items():
            launch = [
                python_with(*packages),
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(workers),
            ]
            found[f"{peer}, {whose} batches"] = [*launch, script, name, str(folder), batches]
    return found


def bar(name: str, title: str) -> Bar:
    return OWN_MNIST if name == "mnist" and "its own" in title else PARITY


def prepare(source: Path, folder: Path) -> None:
    """One folder in which every contestant finds the images where it looks for them."""
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
    parser.add_argument("--rounds", type=int, default=11)
    words = parser.parse_args()
    if unknown := [name for name in words.cases if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(words.data_dir, folder)
        for name in words.cases or CASES:
            for workers in words.workers:
                jobs = commands(name, folder, workers)
                with contestants(jobs, workers) as works:
                    bars = {title: bar(name, title) for title in works if "batches" in title}
                    title = f"throughput: {name}, {workers} worker{'s' if workers > 1 else ''}"
                    compare(title, works, bars, Unit("images/s", per_second=True), words.rounds)


if __name__ == "__main__":
    main()
