"""A loop with DistributedDataParallel and torch's loader, for studies: lockstep run -np 2 -- python examples/ddp.py"""

import argparse
import os

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)  # per worker
batch_size = parser.parse_args().batch_size

distributed.init_process_group()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
torch.manual_seed(0)
data = TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
batches = DataLoader(data, batch_size, sampler=sampler)
for epoch in range(90):
    sampler.set_epoch(epoch)
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
