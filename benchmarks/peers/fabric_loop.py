"""The peer with Lightning Fabric, written like its examples.

python fabric_loop.py CASE FOLDER own|lockstep, under torchrun
"""

from __future__ import annotations

import os

import torch.nn.functional as F
from cases import asked
from lightning_fabric import Fabric
from turns import take_turns

task = asked()
workers = int(os.environ["WORLD_SIZE"])
fabric = Fabric(accelerator="cpu", devices=workers, strategy="ddp" if workers > 1 else "auto")
fabric.launch()
model = task.model()
model, optimizer = fabric.setup(model, task.optimizer(model))
batches = task.batches(fabric.global_rank, fabric.world_size)


def epoch() -> int:
    model.train()
    images_seen = 0
    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        images_seen += len(labels)
        if step % 20 == 0:
            loss.item()
    return images_seen


take_turns(epoch)
