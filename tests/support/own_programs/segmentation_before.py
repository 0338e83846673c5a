"""Train a network that segments images of different sizes, padded to a multiple of 16."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6)
parser.add_argument("--float64", action="store_true")
args = parser.parse_args()
IGNORED = 255


class Squares(Dataset):
    """Images with a bright square, whose pixels are class 1."""

    def __len__(self):
        return 82

    def __getitem__(self, index):
        height, width = torch.randint(8, 15, (2,)).tolist()
        top, left = index % 4, index % 3
        mask = torch.zeros(height, width, dtype=torch.long)
        mask[top : top + 4, left : left + 4] = 1
        image = mask[None] + 0.4 * torch.randn(1, height, width)
        mask[torch.rand(mask.shape) < 0.1] = IGNORED  # not annotated
        return {"image": image, "mask": mask, "name": f"square-{index}"}


def collate(samples):
    # Padding to the largest of the batch would make a sample's result depend on the others: borders, group norm.
    height, width = (max(sample["mask"].shape[axis] for sample in samples) for axis in (0, 1))
    height, width = -(-height // 16) * 16, -(-width // 16) * 16
    images, masks = torch.zeros(len(samples), 1, height, width), torch.full((len(samples), height, width), IGNORED)
    for number, sample in enumerate(samples):
        own_height, own_width = sample["mask"].shape
        images[number, :, :own_height, :own_width] = sample["image"]
        masks[number, :own_height, :own_width] = sample["mask"]
    return {"image": images, "mask": masks, "name": [sample["name"] for sample in samples]}


def mean_loss(logits, masks):
    """Return the mean over the images of the mean over an image's valid pixels."""
    losses = F.cross_entropy(logits, masks, ignore_index=IGNORED, reduction="none").sum((1, 2))
    return (losses / (masks != IGNORED).sum((1, 2))).mean()


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    dist.init_process_group("gloo")
    squares = Squares()
    sampler = torch.utils.data.DistributedSampler(squares, shuffle=True)
    train = torch.utils.data.DataLoader(squares, args.batch_size, sampler=sampler, collate_fn=collate)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(1, 8), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.epochs * len(train), power=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        print(f"epoch {epoch}, learning rate {optimizer.param_groups[0]['lr']:.2g}")
        for batch in train:
            optimizer.zero_grad()
            loss = mean_loss(model(batch["image"]), batch["mask"])
            loss.backward()
            optimizer.step()
            scheduler.step()
    dist.destroy_process_group()


main()
