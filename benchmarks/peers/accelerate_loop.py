"""The peer with Hugging Face Accelerate, written like its examples.

python accelerate_loop.py CASE FOLDER own|lockstep, under torchrun
"""

from __future__ import annotations

import torch.nn.functional as F
from accelerate import Accelerator
from cases import asked
from turns import take_turns

task = asked()
accelerator = Accelerator(cpu=True)
model = task.model()
optimizer = task.optimizer(model)
model, optimizer = accelerator.prepare(model, optimizer)
batches = task.batches(accelerator.process_index, accelerator.num_processes)


def epoch() -> int:
    model.train()
    images_seen = 0
    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        images_seen += len(labels)
        if step % 20 == 0:
            loss.item()
    return images_seen


take_turns(epoch)
