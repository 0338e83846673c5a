"""A hand-written DistributedDataParallel loop that measures its own memory; it uses only the network from Lockstep.

    torchrun --nproc-per-node N benchmarks/peers/memory_loop.py FOLDER NET STEPS      peak, after some steps
    torchrun --nproc-per-node N benchmarks/peers/memory_loop.py FOLDER SECONDS        samples over time

Each worker writes FOLDER/RANK.json.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from memory_work import EPOCH_STEPS, GROWTH_BATCH, GROWTH_NET, PEAK_BATCH, Samples, batches, network, own_bytes, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(net: str, samples: int, batch: int, goes_on: Callable[[], bool]) -> None:
    """Train until `goes_on` returns False, which must happen after the same step on every worker."""
    model: nn.Module = network(net)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for images, labels in batches(net, samples, batch):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not goes_on():
            return


def is_over(end: float) -> bool:
    """Return whether rank 0's time is over (collective)."""
    over = torch.tensor(int(time.monotonic() >= end))
    dist.broadcast(over, 0)
    return bool(over.item())


folder, *rest = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
read: object
if len(rest) == 2:
    train(rest[0], int(rest[1]) * PEAK_BATCH, PEAK_BATCH, steps(int(rest[1])))
    read = own_bytes()
else:
    samples, end = Samples(), time.monotonic() + float(rest[0])
    train(GROWTH_NET, EPOCH_STEPS * GROWTH_BATCH, GROWTH_BATCH, samples.until(lambda: is_over(end)))
    read = {"pairs": samples.pairs}
Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(read))
dist.barrier()
dist.destroy_process_group()
