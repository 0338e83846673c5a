"""CIFAR-10 with Horovod's API, and checkpoints to resume from, also with another number of workers.

    horovodrun -np 2 python examples/horovod/cifar10.py --epochs 2     # on Lockstep's digits, in color
    horovodrun -np 2 python examples/horovod/cifar10.py --epochs 4     # resumes at epoch 3
    horovodrun -np 4 python examples/horovod/cifar10.py --data-dir cifar10 --epochs 30

The images are DATA_DIR/train/CLASS/*.jpg and DATA_DIR/test/CLASS/*.jpg.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from lockstep.data.sources import digits

HALF = (0.5, 0.5, 0.5)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on CIFAR-10 with Horovod's API, and resume from checkpoints.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder with train/CLASS/*.jpg and test/CLASS/*.jpg (default: digits in color)")
    add("--checkpoint-dir", type=Path, default=Path("cifar10-checkpoints"))
    add("--epochs", type=int, default=2, help="total epochs, including those of the resumed job")
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--lr", type=float, default=0.05, help="learning rate for one worker; scaled by their number")
    add("--weight-decay", type=float, default=5e-4)
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="loader processes per worker")
    add("--no-cuda", action="store_true")
    return parser.parse_args()


def load_data(folder: Path | None) -> tuple[Any, Any]:
    """Return training and test set of (image [3, side, side], label)."""
    if folder is None:
        return color(digits.load().train), color(digits.load().val)
    plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize(HALF, HALF)])
    augmented = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), plain])
    return ImageFolder(str(folder / "train"), augmented), ImageFolder(str(folder / "test"), plain)


def color(split: Any) -> TensorDataset:
    """Enlarge digits of 8 x 8 pixels to 16 x 16, and give each a random color that depends on its index."""
    images = F.interpolate(split.images / 127.5 - 1, scale_factor=2)
    hues = 0.5 + torch.rand(len(images), 3, 1, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images * hues, split.labels)


def build_model() -> nn.Module:
    """Build three convolutions with batch norm, for color images of any size."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    pooled = (nn.MaxPool2d(2),)
    return nn.Sequential(
        *(*block(3, 32), *pooled, *block(32, 64), *pooled, *block(64, 128)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )


def newest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("epoch-*.pt"), default=None)


def accuracy(model: nn.Module, test_set: Dataset[Any], samples: int, device: torch.device) -> float:
    """Return the percentage of correctly classified test images; each worker evaluates a share (collective)."""
    model.eval()
    share = Subset(test_set, range(hvd.rank(), samples, hvd.size()))
    right = torch.zeros(1)
    with torch.inference_mode():
        for images, labels in DataLoader(share, batch_size=256):
            right += (model(images.to(device)).argmax(1).cpu() == labels).sum()
    return 100 * hvd.allreduce(right, name="right", op=hvd.Sum).item() / samples


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    train_set, test_set = load_data(args.data_dir)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, num_workers=args.workers)

    model = build_model().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=0.9, weight_decay=args.weight_decay, nesterov=True
    )

    # Only rank 0 needs access to the checkpoints. It loads the newest one and broadcasts its contents.
    done_epochs = 0
    if hvd.rank() == 0 and (newest := newest_checkpoint(args.checkpoint_dir)):
        saved = torch.load(newest, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done_epochs = saved["epoch"]
    done_epochs = int(hvd.broadcast(torch.tensor(done_epochs), root_rank=0, name="done_epochs"))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for group in optimizer.param_groups:  # the checkpoint's rate is for its job's number of workers
        group["lr"] = args.lr * hvd.size()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(done_epochs + 1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        right = accuracy(model, test_set, len(test_set), device)
        if hvd.rank() == 0:
            print(f"epoch {epoch} of {args.epochs}: {right:.2f} % right", flush=True)
            save(args.checkpoint_dir / f"epoch-{epoch:04d}.pt", epoch, model, optimizer)


def save(path: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint to a temporary file and rename it, so that a killed job leaves no partial checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
    draft.rename(path)


if __name__ == "__main__":
    main()
