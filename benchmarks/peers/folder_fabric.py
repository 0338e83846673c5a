"""Train on a folder of images with Lightning Fabric, written like its examples.

torchrun --nproc-per-node N folder_fabric.py FOLDER [flags]; one worker needs no torchrun
"""

import os

import torch.nn.functional as F
from folder_job import arguments, counts_of, image_sets, network, optimizer_of
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

flags = arguments()
workers = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=workers, strategy="ddp" if workers > 1 else "auto")
fabric.launch()
train_set, val_set = image_sets(flags)
train = DataLoader(train_set, flags.batch, shuffle=True, num_workers=flags.loaders, drop_last=True)
val = DataLoader(val_set, flags.batch, num_workers=flags.loaders)
train, val = fabric.setup_dataloaders(train, val)
model = network(len(train_set.classes))
model, optimizer = fabric.setup(model, optimizer_of(model, flags.lr))

for epoch in range(flags.epochs):
    model.train()
    for step, (images, labels) in enumerate(train, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        if fabric.global_rank == 0 and step % flags.log_every == 0:
            print(f"epoch {epoch + 1} step {step} loss {loss.item():.4f}", flush=True)
    counts = fabric.all_reduce(counts_of(model, val), reduce_op="sum")
    fabric.print(f"epoch {epoch + 1} top-1 {counts[0] / counts[1]:.2%}", flush=True)
    fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer})
