"""Train a line on points."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
torch.manual_seed(0)
points = torch.linspace(-1, 1, 512).unsqueeze(1)
sampler = DistributedSampler(TensorDataset(points, 3 * points + 1))

model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device.type)
model = DistributedDataParallel(model)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(sampler.dataset, 32, sampler=sampler):
        with torch.autocast(device.type, torch.float16):
            outputs = model(inputs.to(device))
            loss = nn.functional.mse_loss(outputs.float(), targets.to(device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
