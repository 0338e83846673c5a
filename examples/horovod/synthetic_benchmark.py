"""Measure the training throughput of a model in images per second, per worker and in total, with random images.

    horovodrun -np 2 python examples/horovod/synthetic_benchmark.py
    horovodrun -np 8 python examples/horovod/synthetic_benchmark.py --model resnet50 --batch-size 64 --image-size 224

The defaults are small enough for a laptop. The efficiency of N workers is their total divided by N times that of one.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, pstdev

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torchvision import models


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure training of a torchvision model with Horovod's API.")
    add = parser.add_argument
    add("--model", default="resnet18", help="any classification model of torchvision")
    add("--batch-size", type=int, default=8, help="images per worker and step")
    add("--image-size", type=int, default=64)
    add("--warmup-batches", type=int, default=2, help="steps that are not timed")
    add("--batches-per-iteration", type=int, default=3, help="steps that are timed together")
    add("--iterations", type=int, default=5)
    add("--fp16-allreduce", action="store_true", help="send gradients as float16")
    add("--use-adasum", action="store_true", help="combine the workers' steps with Adasum")
    add("--no-cuda", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    hvd.init()
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True

    model = models.get_model(args.model, num_classes=1000).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if args.use_adasum else 0.01 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def images_per_second(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return float(args.batch_size * steps) / (time.perf_counter() - start)

    images_per_second(args.warmup_batches)
    rates = [images_per_second(args.batches_per_iteration) for _ in range(args.iterations)]
    all_rates = [sum(each) for each in zip(*hvd.allgather_object(rates), strict=True)]
    if hvd.rank() == 0:
        kind = torch.cuda.get_device_name(device) if cuda else "CPU"
        print(f"{args.model}, {args.batch_size} images of {args.image_size} x {args.image_size} a worker, {kind}")
        print(f"images/s on one worker: {interval(rates)}")
        print(f"images/s in all, on {hvd.size()}: {interval(all_rates)}")


def interval(values: list[float]) -> str:
    """Return the mean ± 1.96 standard deviations: the range of 95 % of normally distributed values."""
    return f"{mean(values):.1f} ± {1.96 * pstdev(values):.1f}"


if __name__ == "__main__":
    main()
