"""The peer of cifar_minutes.py: a hand-written DistributedDataParallel loop, with torchvision's transforms.

    torchrun --nproc-per-node N cifar_ddp.py FOLDER [--desired-acc 0.8] [--epochs 10]

Only the network is Lockstep's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from lockstep.models import registry

BATCH, LR, WARM_UP_EPOCHS, WEIGHT_DECAY, SMOOTHING = 64, 0.1, 2, 5e-4, 0.1
CHANNELS_LAST = torch.channels_last


def loader_of(folder: str, *change: Any, shuffle: bool) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    dataset = datasets.ImageFolder(folder, transforms.Compose([*change, transforms.ToTensor(), normalize]))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=shuffle)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=1, persistent_workers=True), sampler


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without weight decay for biases and norms."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for weight in net.parameters():
        groups[weight.ndim > 1].append(weight)
    decayed = {"params": groups[True], "weight_decay": WEIGHT_DECAY}
    return torch.optim.SGD([decayed, {"params": groups[False], "weight_decay": 0.0}], LR, 0.9, nesterov=True)


def rate(step: int, epoch_steps: int, epochs: int) -> float:
    """Return the factor of the learning rate: a linear warm-up and a linear decay to 0."""
    warm_up, total = WARM_UP_EPOCHS * epoch_steps, epochs * epoch_steps
    return min((step + 1) / warm_up, (total - step) / max(1, total - warm_up))


@torch.inference_mode()
def top1_of(net: nn.Module, batches: DataLoader[Any]) -> float:
    """Return the accuracy over all workers (collective)."""
    net.eval()
    counts = torch.zeros(2)
    for images, labels in batches:
        right = net(images.to(memory_format=CHANNELS_LAST)).argmax(1) == labels
        counts += torch.tensor([right.sum().item(), len(labels)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main(folder: str, desired: float, epochs: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    crop = transforms.RandomCrop(32, padding=4, padding_mode="reflect")
    train, sampler = loader_of(f"{folder}/train", crop, transforms.RandomHorizontalFlip(), shuffle=True)
    test, _ = loader_of(f"{folder}/test", shuffle=False)
    net = registry.build("cifar-small", 10, 3, 32).to(memory_format=CHANNELS_LAST)
    model = DistributedDataParallel(net)
    optimizer = optimizer_of(net)
    schedule = LambdaLR(optimizer, lambda step: rate(step, len(train), epochs))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            outputs = model(images.to(memory_format=CHANNELS_LAST))
            F.cross_entropy(outputs, labels, label_smoothing=SMOOTHING).backward()
            optimizer.step()
            schedule.step()
        top1 = top1_of(net, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} top-1 {100 * top1:.2f} %", flush=True)
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
        if top1 >= desired:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--desired-acc", type=float, default=0.8)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    main(given.folder, given.desired_acc, given.epochs)
