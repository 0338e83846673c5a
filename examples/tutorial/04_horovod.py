"""Step 4: Horovod's API, in the eight steps that the comments number.

horovodrun -np 2 python examples/tutorial/04_horovod.py [--epochs 5] [--resume checkpoint.pt]
"""

import argparse
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from task import build_model, count_correct, load_digits
from torch.utils.data import DataLoader, DistributedSampler, Subset

BATCH = 32  # per worker
RATE = 0.01  # for a batch of 32


def main(epochs: int, resume: Path | None) -> None:
    # 1. Initialize: connect to the other workers.
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    # 2. Pin the device: one GPU per worker on each node.
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    model = build_model().to(device)
    # 3. Scale the learning rate: the global batch is `size` times as large.
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * size, momentum=0.9)
    start = 0
    if resume and rank == 0:
        state = torch.load(resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = RATE * size  # the file holds the rate for its number of workers
        start = state["epochs"]

    # 4. Wrap the optimizer: it averages the gradients over the workers.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # 5. Broadcast rank 0's weights, optimizer state and epoch.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    start = hvd.broadcast_object(start, root_rank=0)

    # 6. Partition the data: each worker takes its share of each epoch.
    train_set, test_set = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, size, rank, drop_last=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    test_share = Subset(test_set, range(rank, len(test_set), size))

    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2, device=device)  # sum, count
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])

        # 7. Checkpoint on rank 0 only.
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, "checkpoint.pt")

        # 8. Average the metrics: every worker must call this, so it is outside the `if`.
        metrics = torch.cat([losses, count_correct(model, test_share, device)])
        metrics = hvd.allreduce(metrics, name="metrics", op=hvd.Sum)
        loss_sum, steps, correct, count = metrics.tolist()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum / steps:.4f}, {correct:.0f} of {count:.0f} correct", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    main(**vars(parser.parse_args()))
