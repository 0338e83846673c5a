"""Train your model on your data with Lockstep's training loop.

python examples/fit.py, or on two workers: torchrun --nproc-per-node 2 examples/fit.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.train import EarlyStopping, fit


def disks_and_squares(samples: int, seed: int) -> TensorDataset:
    """Noisy 16 x 16 images of a disk (0) or a square (1) of any size."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (samples,), generator=generator)
    radius = 3 + 4 * torch.rand(samples, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(16) - 7.5, torch.arange(16) - 7.5, indexing="ij")
    disk, square = (x**2 + y**2).sqrt() < radius, torch.maximum(x.abs(), y.abs()) < 0.886 * radius
    shapes = torch.where(labels[:, None, None] == 0, disk, square).float()
    return TensorDataset((shapes + 0.3 * torch.randn(shapes.shape, generator=generator)).unsqueeze(1), labels)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 2))
    train_set, val_set, stopping = disks_and_squares(4096, 1), disks_and_squares(512, 2), EarlyStopping(patience=2)
    result = fit(model, train_set, val_set, epochs=5, batch_size=32, lr=0.0125, callbacks=[stopping])
    print(f"{100 * result.top1:.1f} % of {result.samples} images right")
