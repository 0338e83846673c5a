"""Train a model of text, whose targets are the next tokens: lockstep run -np 2 -- python examples/text.py"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep.train import fit

TOKENS = (torch.arange(4000) ** 2 // 7) % 31


class Crops(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.first + 16 * index
        return TOKENS[start : start + 16], TOKENS[start + 1 : start + 17]


def next_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One loss for each sample: the mean over its tokens."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


torch.manual_seed(0)
result = fit(
    nn.Sequential(nn.Embedding(31, 32), nn.Linear(32, 31)),
    Crops(0, 200),
    Crops(3200, 40),
    loss=next_token,
    optimizer=torch.optim.AdamW,
    epochs=2,
    batch_size=10,
    run_dir="runs/text",
)
assert result.history.val["loss"][-1] < result.history.val["loss"][0]
