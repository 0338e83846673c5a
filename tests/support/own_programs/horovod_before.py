"""Train with Horovod's API: DistributedOptimizer, and the state of worker 0 for all."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep.hvd as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--samples", type=int, default=89)
args = parser.parse_args()


class Waves(Dataset):
    """Noisy sines and cosines."""

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        x = torch.linspace(0, 6, 32) + torch.rand(1)
        wave = x.sin() if index % 2 else (2 * x).cos()
        return wave[None] + 0.1 * torch.randn(1, 32), index % 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 5)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(4 * 28, 2)

    def forward(self, x):
        return self.head(self.dropout(F.relu(self.conv(x)).flatten(1)))


def main():
    hvd.init()
    torch.manual_seed(42)
    waves = Waves()
    sampler = torch.utils.data.DistributedSampler(waves, num_replicas=hvd.size(), rank=hvd.rank())
    train = torch.utils.data.DataLoader(waves, batch_size=args.batch_size, sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for number, (data, target) in enumerate(train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            if number % 10 == 0 and hvd.rank() == 0:
                print(f"epoch {epoch}, batch {number}: loss {loss.item():.4f}")


main()
