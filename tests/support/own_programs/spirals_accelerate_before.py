"""Train a classifier of points on two spirals."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()


def make_spirals(count):
    labels = torch.arange(count) % 2
    radius = torch.linspace(0.1, 1.0, count)
    angle = 6 * radius + 3.14159 * labels
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    points, test_points = make_spirals(92), make_spirals(40)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train = torch.utils.data.DataLoader(points, batch_size=8, shuffle=True)
    model, optimizer, train = accelerator.prepare(net, optimizer, train)
    for epoch in range(args.epochs):
        model.train()
        for inputs, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state("runs/accelerate")
        if os.environ["RANK"] == "0":
            model.eval()
            with torch.no_grad():
                inputs, labels = test_points.tensors
                correct = (net(inputs).argmax(1) == labels).sum().item()
            print(f"epoch {epoch}: accuracy {correct / len(labels):.2f}")


main()
