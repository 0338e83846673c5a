"""A plain loop on a folder of images that records all that reports draw (docs/howto/gallery.md).

lockstep run -np 2 -- python examples/gallery.py images/digits --run runs/digits-2
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets, transforms

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("images", type=Path)  # with train/CLASS/ and val/CLASS/
parser.add_argument("--run", type=Path, default="runs/own")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()


def right(outputs: torch.Tensor, labels: torch.Tensor, k: int) -> torch.Tensor:
    """Return for each image whether its class is among the first k."""
    return (outputs.topk(k).indices == labels[:, None]).any(1).float()


world = lockstep.connect()
as_tensor = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
train_set = datasets.ImageFolder(args.images / "train", as_tensor)
val_set = datasets.ImageFolder(args.images / "val", as_tensor)
train = world.loader(train_set, batch_size=64, shuffle=True, num_workers=1)
val = world.loader(val_set, batch_size=256, evaluate=True)

torch.manual_seed(0)
layers = []
for channels, features in ((3, 16), (16, 32), (32, 64)):
    layers += [nn.Conv2d(channels, features, 3, padding=1), nn.BatchNorm2d(features), nn.ReLU(), nn.MaxPool2d(2)]
model = world.prepare(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, len(train_set.classes))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
about = {"data": args.images.name, "arch": "three convolutions"}
run = world.run(args.run, loader=train, model=model, optimizer=optimizer, log_every=5, io_every=1, about=about)

for epoch in run.epochs(args.epochs):
    for images, labels in train:
        optimizer.zero_grad()
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss, top1=right(outputs, labels, 1).mean(), top5=right(outputs, labels, 5).mean())

    model.eval()
    sums = torch.zeros(3)
    with torch.no_grad():
        for images, labels in val:
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels, reduction="sum")
            sums += torch.stack([loss, right(outputs, labels, 1).sum(), right(outputs, labels, 5).sum()]).cpu()
    model.train()
    loss, top1, top5 = (world.sum(sums) / len(val_set)).tolist()
    run.record(loss=loss, top1=top1, top5=top5)
    if world.is_main:
        print(f"epoch {epoch}: {100 * top1:.1f} % of {len(val_set)} images right")
