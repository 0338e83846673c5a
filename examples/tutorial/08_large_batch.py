"""Step 8: large batches: gradient accumulation, a scaled learning rate, warm-up, and LAMB.

torchrun --nproc-per-node 2 examples/tutorial/08_large_batch.py --batch-size 64 --accumulate 2 --scale-rate
"""

import argparse
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import build_model, count_correct, load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lockstep.train.optim.lamb import LAMB

BASE_BATCH = 64  # the global batch that RATE was tuned for
RATE = 0.02


def main(args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    size = int(os.environ["WORLD_SIZE"])
    global_batch = args.batch_size * size * args.accumulate
    rate = args.rate * global_batch / BASE_BATCH if args.scale_rate else args.rate
    model = build_model(args.seed).to(device)
    optimizer: torch.optim.Optimizer
    if args.lamb:
        optimizer = LAMB(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    # After the optimizer, so that destroy_process_group() ends Gloo's threads.
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    train_set, test_set = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=100 * args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_share = Subset(test_set, range(rank, len(test_set), size))
    steps_per_epoch = len(loader) // args.accumulate
    warmup = args.warmup_epochs * steps_per_epoch
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))
    if rank == 0:
        print(f"global batch {global_batch}, {steps_per_epoch} steps an epoch, rate {rate:g}", flush=True)

    parallel = DistributedDataParallel(model)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2, device=device)
        batches = iter(loader)
        for _ in range(steps_per_epoch):
            optimizer.zero_grad()
            for part in range(args.accumulate):
                images, labels = next(batches)
                is_last = part == args.accumulate - 1
                with nullcontext() if is_last else parallel.no_sync():
                    loss = F.cross_entropy(parallel(images.to(device)), labels.to(device))
                    (loss / args.accumulate).backward()
                losses += torch.stack([loss.detach(), torch.ones_like(loss)])
            optimizer.step()
            schedule.step()

        metrics = torch.cat([losses, count_correct(model, test_share, device)])
        dist.all_reduce(metrics)
        loss_sum, passes, correct, count = metrics.tolist()
        if rank == 0 and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum / passes:.4f}, {correct:.0f} of {count:.0f} correct", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker and pass")
    parser.add_argument("--accumulate", type=int, default=1, help="passes per step")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--scale-rate", action="store_true", help=f"multiply the rate by global batch / {BASE_BATCH}")
    parser.add_argument("--warmup-epochs", type=int, default=0)
    parser.add_argument("--lamb", action="store_true", help="use LAMB instead of SGD")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
