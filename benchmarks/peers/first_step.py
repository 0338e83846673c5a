"""A hand-written script for the first step of digits-net: torch alone, and DDP for several workers.

    torchrun --nproc-per-node N benchmarks/peers/first_step.py FILE

The images are random. After the first step, rank 0 writes the Unix time to FILE.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 64

workers, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
model: nn.Module = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU(inplace=True)),
    *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.GroupNorm(8, 128), nn.ReLU(inplace=True)),
    *(nn.Flatten(), nn.Linear(128 * 4 * 4, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if workers > 1:
    # After the optimizer: creating it imports modules that would keep a reference to the process group.
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
images, labels = torch.randn(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,))
loss = F.cross_entropy(model(images), labels)
loss.backward()
optimizer.step()
loss.item()
if rank == 0:
    Path(sys.argv[1]).write_text(f"{time.time():.6f}")
if workers > 1:
    del model, loss  # they reference the group, whose threads may abort Python at exit
    torch.distributed.destroy_process_group()
