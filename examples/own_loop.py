"""Your own training loop, exact: the same steps with any number of workers, and after a stop.

lockstep run -np 2 -- python examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from shapes import build, load

import lockstep

world = lockstep.connect()  # any launcher, any device
train_set, val_set = load()
torch.manual_seed(0)
model = world.prepare(build(num_classes=2))  # the device, DistributedDataParallel
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
train = world.loader(train_set, global_batch=32, shuffle=True)
val = world.loader(val_set, batch_size=64, evaluate=True)
run = world.run("runs/own-loop", loader=train, model=model, optimizer=optimizer)

for epoch in run.epochs(3):
    for images, labels in train:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        run.backward(loss)
        optimizer.step()
        run.step(loss=loss)

    model.eval()
    with torch.no_grad():
        hits = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in val)
    model.train()
    top1 = world.sum(hits) / len(val_set)
    run.record(top1=top1)
    if world.is_main:
        print(f"epoch {epoch}: {100 * top1:.1f} % of {len(val_set)} images right")
