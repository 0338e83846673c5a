"""Train a line on points."""

import os

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(0)
points = torch.linspace(-1, 1, 512).unsqueeze(1)
sampler = DistributedSampler(TensorDataset(points, 3 * points + 1))

model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
model = DistributedDataParallel(model)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(sampler.dataset, 32, sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
