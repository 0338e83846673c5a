"""A training loop of your own over Lockstep's loaders: each worker gets its share, augmented and normalised.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import AugmentConfig
from lockstep.data.loaders import loaders
from lockstep.models import registry


def main() -> None:
    """Five epochs on the digits, and the accuracy over all workers."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    train, test = loaders("digits", batch_size=32, rank=rank, size=size, augment=AugmentConfig(shift=1))
    torch.manual_seed(0)
    model = DistributedDataParallel(registry.build("digits-net", num_classes=10, in_channels=1, side=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for _ in range(5):
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    right = torch.zeros(2)
    with torch.inference_mode():
        for images, labels in test:
            hits = model.module(images).argmax(1) == labels
            right += torch.tensor([hits.sum(), len(hits)])
    dist.all_reduce(right)
    if rank == 0:
        print(f"{100 * right[0] / right[1]:.1f} % of {right[1]:.0f} images right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
