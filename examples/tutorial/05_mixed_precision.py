"""Step 5: mixed precision: forward and backward in 16 bits, weights and sums in 32.

torchrun --nproc-per-node 2 examples/tutorial/05_mixed_precision.py [--precision fp32|bf16|fp16] [--loss-scale 65536]

--precision defaults to fp16 on GPUs and to bf16 on CPUs. fp16 also works on CPUs, slowly.
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

GLOBAL_BATCH = 64
RATE = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(epochs: int, resume: Path | None, precision: str | None, loss_scale: float) -> None:
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

    dtype = DTYPES[precision or ("fp16" if cuda else "bf16")]
    scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=dtype == torch.float16)

    train_set, test_set = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, GLOBAL_BATCH // size, sampler=sampler, drop_last=True)
    test_share = Subset(test_set, range(rank, len(test_set), size))

    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(2, device=device)  # sum, count
        for step, (images, labels) in enumerate(loader, start=1):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                outputs = parallel(images.to(device))
                loss = F.cross_entropy(outputs, labels.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # divides the gradients by the scale; skips the step if any is infinite
            scale = scaler.get_scale()
            scaler.update()
            if rank == 0 and scaler.get_scale() < scale:
                print(f"step {step}: gradient overflow, skipped; loss scale now {scaler.get_scale():g}", flush=True)
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])

        if rank == 0 and epoch == start:
            kinds = {"weights": model[0].weight, "outputs": outputs, "loss": loss, "gradients": model[0].weight.grad}
            print(", ".join(f"{name} {tensor.dtype}" for name, tensor in kinds.items()), flush=True)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, "checkpoint.pt")
        metrics = torch.cat([losses, count_correct(model, test_share, device)])
        dist.all_reduce(metrics)
        loss_sum, steps, correct, count = metrics.tolist()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss_sum / steps:.4f}, {correct:.0f} of {count:.0f} correct", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--precision", choices=DTYPES)
    parser.add_argument("--loss-scale", type=float, default=2.0**16, help="initial loss scale; it adapts")
    main(**vars(parser.parse_args()))
