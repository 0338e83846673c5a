"""Train a small network with batch norm that segments pictures of blobs: random crops, class weights, best mIoU."""

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=6, help="per step, over all workers")
parser.add_argument("--float64", action="store_true")
args = parser.parse_args()
CLASSES, IGNORED = 3, 255


class Blobs(Dataset):
    """Pictures with a bright and a dark blob on gray; random crops and flips in training."""

    def __init__(self, count, is_training):
        self.count, self.is_training = count, is_training

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        own = np.random.default_rng(index)
        image, mask = own.normal(0, 0.3, (20, 20)), np.zeros((20, 20), int)
        for label in (1, 2):
            top, left = own.integers(0, 13, 2)
            mask[top : top + 7, left : left + 7] = label
        image += np.array([0.0, 1.0, -1.0])[mask]
        mask[own.random(mask.shape) < 0.1] = IGNORED
        top, left = (random.randint(0, 4), random.randint(0, 4)) if self.is_training else (2, 2)
        image, mask = image[top : top + 16, left : left + 16], mask[top : top + 16, left : left + 16]
        if self.is_training and np.random.rand() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        image = torch.tensor(image[None].copy(), dtype=torch.get_default_dtype())
        if self.is_training:
            image = image + 0.1 * torch.randn_like(image)
        return image, torch.tensor(mask.copy())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(9, CLASSES, 1)

    def forward(self, images):
        features = F.interpolate(self.middle(self.down(images)), scale_factor=2)
        return self.head(torch.cat([images, features], 1))


def main():
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    world = lockstep.connect("cpu")
    torch.manual_seed(0)
    train = world.loader(Blobs(51, True), global_batch=args.batch_size, shuffle=True, num_workers=1)
    val = world.loader(Blobs(20, False), 4, evaluate=True)
    model = world.prepare(Net(), sync_bn=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.epochs * len(train), power=0.9)
    class_weights = torch.tensor([0.5, 1.0, 1.0])
    loss_fn = nn.CrossEntropyLoss(class_weights, ignore_index=IGNORED)
    run = world.run("runs/own", loader=train, model=model, optimizer=optimizer, scheduler=scheduler, log_every=1)
    for epoch in run.epochs(args.epochs):
        model.train()
        for images, masks in train:
            loss = loss_fn(model(images), masks)
            optimizer.zero_grad()
            run.backward(loss, weight=class_weights[masks[masks != IGNORED]].sum())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            run.step(loss=loss)
        model.eval()
        confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
        with torch.no_grad():
            for images, masks in val:
                known = masks != IGNORED
                pairs = masks[known] * CLASSES + model(images).argmax(1)[known]
                confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)
        confusion = world.sum(confusion)
        hits = confusion.diagonal().double()
        miou = (hits / (confusion.sum(0) + confusion.sum(1) - hits)).mean().item()
        run.record(miou=miou)
        if world.is_main:
            print(f"epoch {epoch}: mIoU {miou:.6f}, best {run.extra.get('best', 0.0):.6f}")
        if miou > run.extra.get("best", 0.0):
            run.extra["best"] = miou
            run.save(best=True)


if __name__ == "__main__":
    main()
