"""MNIST with Horovod's API: all the changes that a script for one device needs to train on several.

    python examples/horovod/mnist.py                                  # one worker, on Lockstep's digits
    horovodrun -np 2 python examples/horovod/mnist.py
    horovodrun -np 4 python examples/horovod/mnist.py --data-dir data --epochs 8 --lr 0.01

torchrun and mpirun can start it too. The comments number the changes.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from lockstep.data.sources import digits


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on MNIST with Horovod's API.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder with MNIST's four IDX files, plain or .gz (default: digits)")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--lr", type=float, default=0.02, help="learning rate for one worker; scaled by their number")
    add("--momentum", type=float, default=0.9)
    add("--seed", type=int, default=42)
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add("--use-adasum", action="store_true", help="combine the workers' steps with Adasum")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by this before the sum instead of after")
    add("--checkpoint", type=Path, help="file that rank 0 writes after each epoch")
    add("--no-cuda", action="store_true")
    return parser.parse_args()


def read_idx(folder: Path, name: str) -> Tensor:
    """Read an IDX file as uint8: two zeros, dtype code, number of dimensions, big-endian shape, data."""
    path = next((path for path in sorted(folder.rglob(f"{name}*")) if path.is_file()), None)
    if path is None:
        raise SystemExit(f"--data-dir {folder}: {name} or {name}.gz not found")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, start, 4)]
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


def load_data(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set: images [N, 1, side, side] with mean 0 and variance 1, labels [N]."""
    if folder is None:
        data: Any = digits.load()
        splits = [(split.images, split.labels) for split in (data.train, data.val)]
    else:
        splits = [
            (read_idx(folder, f"{part}-images-idx3-ubyte").unsqueeze(1), read_idx(folder, f"{part}-labels-idx1-ubyte"))
            for part in ("train", "t10k")
        ]
    mean, deviation = splits[0][0].float().mean(), splits[0][0].float().std()
    train, test = (TensorDataset((images - mean) / deviation, labels.long()) for images, labels in splits)
    return train, test


class Net(nn.Sequential):
    """Two convolutions and two linear layers, for grayscale images of `side` x `side` pixels."""

    def __init__(self, side: int) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * (side // 2) ** 2, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


def evaluate(model: nn.Module, test_set: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Return mean loss and accuracy in percent; each worker evaluates a share (collective)."""
    model.eval()
    share = Subset(test_set, range(hvd.rank(), len(test_set), hvd.size()))
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode():
        for images, labels in DataLoader(share, batch_size=256):
            outputs, labels = model(images.to(device)), labels.to(device)
            loss = F.cross_entropy(outputs, labels, reduction="sum")
            totals += torch.tensor([loss, (outputs.argmax(1) == labels).sum(), len(labels)])
    # 8. Reduce the metrics over the workers.
    loss, right, count = hvd.allreduce(totals, name="evaluation", op=hvd.Sum).tolist()
    return loss / count, 100 * right / count


def main() -> None:
    args = parse_arguments()
    # 1. Connect to the other workers.
    hvd.init()
    torch.manual_seed(args.seed)
    # 2. Use one GPU per worker.
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    # 3. Give each worker a different share of the samples, reshuffled in each epoch.
    train_set, test_set = load_data(args.data_dir)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)

    # 4. Scale the learning rate: the global batch is `size` times as large. Adasum needs no scaling: its step ranges
    #    from one worker's, if the gradients are parallel, to their sum, if they are orthogonal.
    model = Net(side=train_set[0][0].shape[-1]).to(device)
    lr = args.lr if args.use_adasum else args.lr * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)

    # 5. Start with rank 0's weights and optimizer state on all workers.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # 6. Wrap the optimizer: it reduces the gradients over the workers during the backward pass.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        loss, accuracy = evaluate(model, test_set, device)
        # 7. Print and save only on rank 0.
        if hvd.rank() == 0:
            print(f"epoch {epoch} of {args.epochs}: loss {loss:.4f}, {accuracy:.2f} % right", flush=True)
            if args.checkpoint:
                torch.save(
                    {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint
                )


if __name__ == "__main__":
    main()
