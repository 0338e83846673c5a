"""What `lockstep train cifar10` trains, in a loop of your own: the same samples, augmentation, weights and losses.

lockstep run -np 2 -- python examples/train_cifar.py cifar10
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import lockstep
from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog
from lockstep.data.readers import MemoryReader, Placement
from lockstep.data.sets import MemorySplit
from lockstep.models import registry
from lockstep.seeding import seed_all

SEED = 0
PEAK_RATE, RATE_BATCH = 0.1, 128  # the rate grows with the global batch
WARMUP_EPOCHS = 1

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", help="cifar10, digits, or a folder of small images")
parser.add_argument("--data-dir", type=Path, default="data")
parser.add_argument("--run-dir", type=Path, default="runs/train-cifar")
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=128, help="samples per worker and step")
parser.add_argument("--log-every", type=int, default=20)
parser.add_argument("--fp64", action="store_true")
args = parser.parse_args()

world = lockstep.connect()
dtype = torch.float64 if args.fp64 else torch.float32

# The data: the loader draws the numbers of this worker's samples, and a reader makes the batch from them.
data = catalog.load(DataConfig(dataset=args.data, data_dir=args.data_dir))
if not (isinstance(data.train, MemorySplit) and isinstance(data.val, MemorySplit)):
    raise SystemExit(f"{args.data}: not held in memory; pass a folder of small images of one size")
placement = Placement(world.device, dtype, torch.channels_last, dtype)
train_images = MemoryReader(data.train, data.input, placement, AugmentConfig(shift=4, flip=True), SEED)
val_images = MemoryReader(data.val, data.input, placement, AugmentConfig(), SEED)
train = world.loader(range(len(data.train)), args.batch_size, shuffle=True, seed=SEED, to_device=False)
val = world.loader(range(len(data.val)), args.batch_size, evaluate=True, to_device=False)

# The model and its optimizer.
seed_all(SEED, 0, 0)
model = registry.build("resnet18", len(data.classes), data.input.channels, data.input.height)
model = world.prepare(model.to(dtype).to(memory_format=torch.channels_last))
peak = PEAK_RATE * args.batch_size * world.size / RATE_BATCH
optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
warmup_steps, total_steps = WARMUP_EPOCHS * len(train), args.epochs * len(train)


def fraction_of_peak(step: int) -> float:
    """Return the rate of a step, from 0, as a fraction of its peak: a linear warm-up, then half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (1 + math.cos(math.pi * min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))) / 2


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, fraction_of_peak)
run = world.run(
    args.run_dir,
    loader=train,
    seed=SEED,
    log_every=args.log_every,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
)


@torch.no_grad()
def evaluate() -> tuple[float, float]:
    """Return top-1 and the mean loss over the validation samples. Collective."""
    model.eval()
    hits = losses = 0.0
    for samples in val:
        images, labels, *_ = val_images.batch(samples.numpy(), epoch=None)
        outputs = model(images)
        hits += float((outputs.argmax(1) == labels).sum())
        losses += float(F.cross_entropy(outputs, labels, reduction="sum"))
    model.train()
    return world.sum(hits) / len(data.val), world.sum(losses) / len(data.val)


for epoch in run.epochs(args.epochs):
    for samples in train:
        images, labels, *_ = train_images.batch(samples.numpy(), epoch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)
        scheduler.step()
    top1, val_loss = evaluate()
    run.record(top1=top1, loss=val_loss)
    if world.is_main:
        print(f"epoch {epoch}: {100 * top1:.1f} % of {len(data.val)} images right")
