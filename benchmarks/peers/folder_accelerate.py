"""Train on a folder of images with Hugging Face Accelerate, written like its examples.

torchrun --nproc-per-node N folder_accelerate.py FOLDER [flags]; one worker needs no torchrun
"""

import torch.nn.functional as F
from accelerate import Accelerator
from folder_job import arguments, counts_of, image_sets, network, optimizer_of
from torch.utils.data import DataLoader

flags = arguments()
accelerator = Accelerator(cpu=True)
train_set, val_set = image_sets(flags)
train = DataLoader(train_set, flags.batch, shuffle=True, num_workers=flags.loaders, drop_last=True)
val = DataLoader(val_set, flags.batch, num_workers=flags.loaders)
model = network(len(train_set.classes))
optimizer = optimizer_of(model, flags.lr)
model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)

for epoch in range(flags.epochs):
    model.train()
    for step, (images, labels) in enumerate(train, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        if step % flags.log_every == 0 and accelerator.is_main_process:
            print(f"epoch {epoch + 1} step {step} loss {loss.item():.4f}", flush=True)
    counts = accelerator.reduce(counts_of(model, val))
    accelerator.print(f"epoch {epoch + 1} top-1 {counts[0] / counts[1]:.2%}", flush=True)
    accelerator.save_state("checkpoint")

accelerator.end_training()
