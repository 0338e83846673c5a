"""Train on a folder of images with a hand-written loop around DistributedDataParallel.

torchrun --nproc-per-node N folder_ddp.py FOLDER [flags]; one worker needs no torchrun
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from folder_job import arguments, counts_of, image_sets, network, optimizer_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

flags = arguments()
rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if workers > 1:
    dist.init_process_group("gloo")
train_set, val_set = image_sets(flags)
sampler = DistributedSampler(train_set, workers, rank)
val_sampler = DistributedSampler(val_set, workers, rank, shuffle=False)
train = DataLoader(train_set, flags.batch, sampler=sampler, num_workers=flags.loaders, drop_last=True)
val = DataLoader(val_set, flags.batch, sampler=val_sampler, num_workers=flags.loaders)
net = network(len(train_set.classes))
model = DistributedDataParallel(net) if workers > 1 else net
optimizer = optimizer_of(model, flags.lr)

for epoch in range(flags.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for step, (images, labels) in enumerate(train, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % flags.log_every == 0:
            print(f"epoch {epoch + 1} step {step} loss {loss.item():.4f}", flush=True)
    counts = counts_of(net, val)
    if workers > 1:
        dist.all_reduce(counts)
    if rank == 0:
        print(f"epoch {epoch + 1} top-1 {counts[0] / counts[1]:.2%}", flush=True)
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")

if workers > 1:
    dist.destroy_process_group()
