"""Train a classifier of points on two spirals."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


def make_spirals(count):
    labels = torch.arange(count) % 2
    radius = torch.linspace(0.1, 1.0, count)
    angle = 6 * radius + 3.14159 * labels
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def main():
    world = lockstep.connect("cpu")
    torch.manual_seed(0)
    points, test_points = make_spirals(92), make_spirals(40)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    model = world.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train = world.loader(points, global_batch=16, shuffle=True)
    run = world.run("runs/own", loader=train, model=model, optimizer=optimizer, checkpoint_steps=4, log_every=1)
    for epoch in run.epochs(args.epochs):
        model.train()
        for inputs, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            run.backward(loss)
            optimizer.step()
            run.step(loss=loss)
        if os.environ["RANK"] == "0":
            model.eval()
            with torch.no_grad():
                inputs, labels = test_points.tensors
                correct = (net(inputs).argmax(1) == labels).sum().item()
            print(f"epoch {epoch}: accuracy {correct / len(labels):.2f}")


main()
