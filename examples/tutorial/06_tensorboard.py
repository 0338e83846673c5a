"""Step 6: TensorBoard with many workers: rank 0 writes the metrics of all workers.

torchrun --nproc-per-node 2 examples/tutorial/06_tensorboard.py && tensorboard --logdir curves
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import build_model, count_correct, load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torch.utils.tensorboard import SummaryWriter

GLOBAL_BATCH = 64
RATE = 0.02


class NoWriter:
    """Stand in for TensorBoard's writer on the other workers."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def main(epochs: int, resume: Path | None) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    start = 0
    if resume:
        state = torch.load(resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epochs"]

    # After the optimizer, so that destroy_process_group() ends Gloo's threads.
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(model)

    train_set, test_set = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, GLOBAL_BATCH // size, sampler=sampler, drop_last=True)
    test_share = Subset(test_set, range(rank, len(test_set), size))

    writer = SummaryWriter("curves", purge_step=start + 1) if rank == 0 else NoWriter()
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2, device=device)  # sum, count
        for images, labels in loader:
            loss = F.cross_entropy(parallel(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])

        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, "checkpoint.pt")
        metrics = torch.cat([losses, count_correct(model, test_share, device)])
        dist.all_reduce(metrics)
        loss_sum, steps, correct, count = metrics.tolist()
        writer.add_scalar("Loss/train", loss_sum / steps, epoch + 1)
        writer.add_scalar("Top1/val", correct / count, epoch + 1)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum / steps:.4f}, {correct:.0f} of {count:.0f} correct", flush=True)
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    main(**vars(parser.parse_args()))
