"""A hand-written peer: DistributedDataParallel, or the bare model with one worker.

python ddp_loop.py CASE FOLDER own|lockstep, under torchrun
"""

from __future__ import annotations

import os

import torch.distributed as dist
import torch.nn.functional as F
from cases import asked
from torch.nn.parallel import DistributedDataParallel
from turns import take_turns

task = asked()
rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = task.model()
if workers > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = task.optimizer(model)
batches = task.batches(rank, workers)


def epoch() -> int:
    model.train()
    images_seen = 0
    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        images_seen += len(labels)
        if step % 20 == 0:
            loss.item()  # for logging
    return images_seen


take_turns(epoch)
