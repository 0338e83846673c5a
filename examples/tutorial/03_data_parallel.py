"""Step 3: nn.DataParallel, with one process for all visible GPUs. Without a GPU it calls the model itself.

python examples/tutorial/03_data_parallel.py [--epochs 5] [--resume checkpoint.pt]
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from task import build_model, count_correct, load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

BATCH = 64
RATE = 0.02


def main(epochs: int, resume: Path | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    start = 0
    if resume:
        state = torch.load(resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epochs"]
    parallel = nn.DataParallel(model)
    print(f"{torch.cuda.device_count()} GPUs", flush=True)

    train_set, test_set = load_digits()
    order = torch.Generator()
    loader = DataLoader(train_set, BATCH, sampler=RandomSampler(train_set, generator=order), drop_last=True)

    for epoch in range(start, epochs):
        order.manual_seed(epoch)
        losses = torch.zeros(2, device=device)  # sum, count
        for images, labels in loader:
            loss = F.cross_entropy(parallel(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
        torch.save(state, "checkpoint.pt")
        metrics = torch.cat([losses, count_correct(model, test_set, device)])
        loss_sum, steps, correct, count = metrics.tolist()
        print(f"epoch {epoch + 1}: loss {loss_sum / steps:.4f}, {correct:.0f} of {count:.0f} correct", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    main(**vars(parser.parse_args()))
