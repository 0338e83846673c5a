"""Train an image classifier with DDP, mixed precision, gradient clipping and a warm-up."""

import argparse
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--samples", type=int, default=92)
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--float64", action="store_true")
parser.add_argument("--sync-bn", action="store_true")
parser.add_argument("--num-workers", type=int, default=0)
args = parser.parse_args()


class Stripes(Dataset):
    """Images of stripes: horizontal (0), vertical (1) or none (2)."""

    def __init__(self, count, train):
        self.count, self.train = count, train

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 3
        image = torch.zeros(1, 8, 8)
        if label < 2:
            image[:, (slice(None), slice(index % 2, None, 2))[label]] = 1.0
            image = image if label else image.transpose(1, 2)
        if self.train:
            if random.random() < 0.5:
                image = image.flip(-1)
            if torch.rand(1) < 0.5:
                image = image.flip(-2)
            image = image * np.random.uniform(0.8, 1.2) + 0.3 * torch.randn(image.shape)
        return image, label


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 3),
    )


def main():
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    world = lockstep.connect("cpu")
    train_set, val_set = Stripes(args.samples, train=True), Stripes(30, train=False)
    train = world.loader(train_set, global_batch=args.batch_size * 2, shuffle=True, num_workers=args.num_workers)
    val = torch.utils.data.DataLoader(val_set, batch_size=10)
    model = world.prepare(make_model(), sync_bn=args.sync_bn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=not args.no_amp)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    run = world.run("runs/own", loader=train, **state, checkpoint_steps=4, log_every=1)
    for epoch in run.epochs(args.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=not args.no_amp):
                loss = F.cross_entropy(model(images), labels)
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            run.step(loss=loss)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                correct = sum((model.module(images).argmax(1) == labels).sum().item() for images, labels in val)
            print(f"epoch {epoch}: accuracy {correct / len(val_set):.2f}")


main()
