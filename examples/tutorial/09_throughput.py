"""Step 9: measure images per second, and how much of a step is the gradient exchange.

torchrun --nproc-per-node 2 examples/tutorial/09_throughput.py [--batch-size 64] [--steps 30]

The images are random: the script measures computation and the exchange of gradients, not data loading.
"""

import argparse
import os
from contextlib import nullcontext
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import build_model
from torch.nn.parallel import DistributedDataParallel

WARMUP_STEPS = 5  # not measured: memory is allocated, caches fill, DDP builds its buckets


def main(batch_size: int, steps: int) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # every step computes the same

    # After the optimizer, so that destroy_process_group() ends Gloo's threads.
    dist.init_process_group("nccl" if cuda else "gloo")
    size = dist.get_world_size()
    parallel = DistributedDataParallel(model)
    images = torch.rand(batch_size, 1, 8, 8, device=device)
    labels = torch.randint(10, (batch_size,), device=device)

    def step_seconds(exchange: bool) -> float:
        """Return the duration of one step, with or without the exchange of gradients."""
        if cuda:
            torch.cuda.synchronize()  # CUDA kernels run asynchronously: wait until they finish
        begin = perf_counter()
        optimizer.zero_grad()
        with nullcontext() if exchange else parallel.no_sync():
            F.cross_entropy(parallel(images), labels).backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return perf_counter() - begin

    for _ in range(WARMUP_STEPS):
        step_seconds(exchange=True)
    both = [(step_seconds(exchange=True), step_seconds(exchange=False)) for _ in range(steps)]
    times = torch.tensor([median(times) for times in zip(*both, strict=True)], device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # the slowest worker's time is the job's
    full, alone = times.tolist()
    if dist.get_rank() == 0:
        workers = "1 worker" if size == 1 else f"{size} workers"
        print(f"{workers}, global batch {batch_size * size}: {batch_size * size / full:,.0f} images/s")
        print(f"a step takes {1e3 * full:.1f} ms, without the exchange {1e3 * alone:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="per worker")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
