"""A custom training loop with Lockstep's loaders: each worker gets its share, augmented and normalized.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.schema import AugmentConfig
from lockstep.data.loaders import loaders
from lockstep.models import registry
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect


def main(world: World) -> None:
    """Train for five epochs on the digits, and print the accuracy over all workers."""
    train, test = loaders("digits", batch_size=32, rank=world.rank, size=world.size, augment=AugmentConfig(shift=1))
    torch.manual_seed(0)
    net = registry.build("digits-net", num_classes=10, in_channels=1, side=8)
    model = DistributedDataParallel(net) if world.size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for _ in range(5):
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    right = torch.zeros(2)
    with torch.inference_mode():
        for images, labels in test:
            hits = net(images).argmax(1) == labels
            right += torch.tensor([hits.sum(), len(hits)])
    world.sum_(right)
    if world.is_main:
        print(f"{100 * right[0] / right[1]:.1f} % of {right[1]:.0f} images right")


if __name__ == "__main__":
    with connect(RankInfo.from_environment(), "cpu") as world:
        main(world)
