"""ResNet-50 on ImageNet with Horovod's API, following Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677.

    horovodrun -np 2 python examples/horovod/imagenet_resnet50.py --model resnet18       # on random images
    horovodrun -np 8 python examples/horovod/imagenet_resnet50.py --epochs 90 --batch-size 32 --image-size 224 \
        --train-dir imagenet/train --val-dir imagenet/val --workers 8 --batches-per-allreduce 2

--base-lr is the rate for one worker's batch. The rate rises to that of the global batch over the first epochs, and is
divided by 10 at each milestone. A job resumes from the newest checkpoint that it finds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torch.utils.tensorboard import SummaryWriter
from torchvision import models, transforms
from torchvision.datasets import FakeData, ImageFolder

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MILESTONES = (30, 60, 80)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an ImageNet classifier with Horovod's API.")
    add = parser.add_argument
    add("--train-dir", type=Path, help="folder of class folders (default: a few random images)")
    add("--val-dir", type=Path, help="the same for validation; needed with --train-dir")
    add("--model", default="resnet50", help="any classification model of torchvision")
    add("--image-size", type=int, default=64)
    add("--epochs", type=int, default=2, help="total epochs, including those of the resumed job")
    add("--batch-size", type=int, default=8, help="images per worker and forward pass")
    add("--batches-per-allreduce", type=int, default=1, help="forward passes per worker and step")
    add("--base-lr", type=float, default=0.0125, help="learning rate for one forward pass of one worker")
    add("--warmup-epochs", type=float, default=5.0)
    add("--weight-decay", type=float, default=5e-5)
    add("--checkpoint-format", default="checkpoint-{epoch}.pt")
    add("--log-dir", type=Path, default=Path("logs"), help="folder for TensorBoard")
    add("--workers", type=int, default=0, help="loader processes per worker")
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add("--use-adasum", action="store_true", help="combine the workers' steps with Adasum")
    add("--seed", type=int, default=42)
    add("--no-cuda", action="store_true")
    args = parser.parse_args()
    if bool(args.train_dir) != bool(args.val_dir):
        parser.error("--train-dir and --val-dir must be given together")
    return args


def load_data(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """Return training set, validation set and the number of classes."""
    side = args.image_size
    pixels = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
    varied = transforms.Compose([transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), *pixels])
    centered = transforms.Compose([transforms.Resize(side * 8 // 7), transforms.CenterCrop(side), *pixels])
    if args.train_dir is None:
        shape = (3, side, side)
        return FakeData(64, shape, transform=varied), FakeData(16, shape, transform=centered, random_offset=1), 10
    train_set = ImageFolder(str(args.train_dir), varied)
    return train_set, ImageFolder(str(args.val_dir), centered), len(train_set.classes)


def rate_factor(epoch: float, workers: int, warmup_epochs: float) -> float:
    """Return the factor of the base rate at `epoch`: from 1 up to `workers`, then divided by 10 at each milestone."""
    if epoch < warmup_epochs:
        return 1 + (workers - 1) * epoch / warmup_epochs
    return workers * 0.1 ** sum(epoch >= milestone for milestone in MILESTONES)


class Averages:
    """Loss and accuracy over the samples of all workers."""

    def __init__(self) -> None:
        self._totals = torch.zeros(3, dtype=torch.float64)

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        loss = F.cross_entropy(outputs, labels, reduction="sum").item()
        self._totals += torch.tensor([loss, (outputs.argmax(1) == labels).sum().item(), len(labels)])

    def reduced(self) -> dict[str, float]:
        """Return the averages over all workers (collective)."""
        loss, right, count = hvd.allreduce(self._totals, op=hvd.Sum).tolist()
        return {"loss": loss / count, "accuracy": right / count}


def train_epoch(
    epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, args: argparse.Namespace
) -> dict[str, float]:
    """Train for one epoch, counted from 0. Each step splits a batch into forward passes of --batch-size."""
    model.train()
    averages, device = Averages(), next(model.parameters()).device
    scale = args.batches_per_allreduce
    workers = 1 if args.use_adasum else hvd.size()
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            progress = epoch + step / len(loader)
            group["lr"] = args.base_lr * scale * rate_factor(progress, workers, args.warmup_epochs)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        for part, part_labels in zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True):
            outputs = model(part)
            averages.add(outputs.detach(), part_labels)
            # Gradients accumulate over the passes; dividing by the whole batch makes their sum its mean.
            (F.cross_entropy(outputs, part_labels, reduction="sum") / len(images)).backward()
        optimizer.step()
    return averages.reduced()


def validate(model: nn.Module, loader: Any) -> dict[str, float]:
    model.eval()
    averages, device = Averages(), next(model.parameters()).device
    with torch.inference_mode():
        for images, labels in loader:
            averages.add(model(images.to(device)), labels.to(device))
    return averages.reduced()


def last_epoch(args: argparse.Namespace) -> int:
    """Return the last epoch with a checkpoint, 0 for none; rank 0's result, on all workers."""
    found = (e for e in range(args.epochs, 0, -1) if Path(args.checkpoint_format.format(epoch=e)).exists())
    return int(hvd.broadcast(torch.tensor(next(found, 0)), root_rank=0, name="last_epoch"))


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    train_set, val_set, classes = load_data(args)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=args.seed)
    step_size = args.batch_size * args.batches_per_allreduce
    reading: dict[str, Any] = {"num_workers": args.workers, "pin_memory": cuda}
    train_loader = DataLoader(train_set, step_size, sampler=sampler, **reading)
    val_loader = DataLoader(Subset(val_set, range(hvd.rank(), len(val_set), hvd.size())), step_size, **reading)

    model = models.get_model(args.model, num_classes=classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.base_lr, momentum=0.9, weight_decay=args.weight_decay)
    done_epochs = last_epoch(args)
    if done_epochs and hvd.rank() == 0:
        saved = torch.load(args.checkpoint_format.format(epoch=done_epochs), map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )

    writer = SummaryWriter(args.log_dir) if hvd.rank() == 0 else None
    for epoch in range(done_epochs, args.epochs):
        sampler.set_epoch(epoch)
        figures = {
            "train": train_epoch(epoch, model, optimizer, train_loader, args),
            "val": validate(model, val_loader),
        }
        if writer:
            report(writer, epoch + 1, figures)
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
    if writer:
        writer.close()


def report(writer: SummaryWriter, epoch: int, figures: dict[str, dict[str, float]]) -> None:
    for part, values in figures.items():
        for name, value in values.items():
            writer.add_scalar(f"{part}/{name}", value, epoch)
    parts = (f"{part} loss {each['loss']:.4f}, {100 * each['accuracy']:.2f} % right" for part, each in figures.items())
    print(f"epoch {epoch}: {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
