"""Trainings with `fit` in the style of public examples, on other items than images with labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lockstep.train import Result, fit
from lockstep.world.world import World

VOCABULARY, BLOCK, WIDTH = 17, 12, 16
RATES = {"gpt": 0.1, "segmenter": 0.2, "line": 0.05}
COMMON: dict[str, Any] = {"loader_workers": 0, "log_every": 1, "track": (), "io_every": 0, "precision": "fp64"}


class Crops(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Crops at random places of a stream of tokens, and the same crops one token later."""

    def __init__(self, count: int):
        places = torch.arange(1000)
        self.tokens, self.count = (places * places // 7 + places) % VOCABULARY, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(torch.randint(len(self.tokens) - BLOCK, ()))
        crop = self.tokens[start : start + BLOCK + 1]
        return crop[:-1], crop[1:]


class SmallGpt(nn.Module):
    """A decoder of one block, from tokens [N, L] to logits [N, L, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        hidden = self.tokens(tokens) + self.places(torch.arange(length))
        logits: torch.Tensor = self.head(self.block(hidden, src_mask=mask))
        return logits


def next_token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train_gpt(world: World, path: Path, **settings: Any) -> Result:
    torch.manual_seed(0)
    perplexity = {
        "bits": lambda outputs, targets: (next_token_loss(outputs, targets) * targets.numel(), targets.numel())
    }
    chosen = {"epochs": 2, "global_batch_size": 10, "loss": next_token_loss, **COMMON, **settings}
    return fit(SmallGpt(), Crops(45), Crops(13), run_dir=path, metrics=perplexity, **chosen)


class Shapes(Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Noisy images and their gain, and masks of the rectangle in each; the image of sample `bad` has a NaN."""

    def __init__(self, count: int, bad: int = -1):
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        mask = torch.zeros(8, 8)
        top, left = index % 4, index // 4 % 4
        mask[top : top + 4, left : left + 3] = 1
        image = mask + 0.3 * torch.randn(8, 8)  # torch's global generator is seeded by sample
        image[0, 0] = torch.nan if index == self.bad else 0
        return {"image": image.unsqueeze(0), "gain": torch.tensor([index % 3 + 1])}, mask.long()


class SmallSegmenter(nn.Module):
    """Returns logits [N, 2, H, W] as a mapping, as torchvision's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 2, 1))

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert inputs["gain"].dtype == torch.int64
        return {"out": self.body(inputs["image"] * inputs["gain"][:, :, None, None])}


def pixel_loss(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["out"], targets, reduction="none").flatten(1).mean(1)


def overlap(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return intersection over union of all pixels."""
    found = outputs["out"].argmax(1)
    return (found & targets).sum(), (found | targets).sum()


def train_segmenter(world: World, path: Path, bad: int = -1, **settings: Any) -> Result:
    torch.manual_seed(0)
    chosen = {"epochs": 3, "global_batch_size": 10, "loss": pixel_loss, **COMMON, **settings}
    return fit(SmallSegmenter(), Shapes(45, bad), Shapes(2), run_dir=path, metrics={"overlap": overlap}, **chosen)


def train_line(world: World, path: Path, **settings: Any) -> Result:
    """Fit a line, with a mean as loss and single numbers as targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(58, 5, generator=generator)
    data = TensorDataset(inputs, inputs @ torch.arange(5.0) + 1)
    torch.manual_seed(0)
    chosen = {"epochs": 3, "global_batch_size": 10, "loss": nn.MSELoss(), **COMMON, **settings}
    train_set, val_set = (torch.utils.data.Subset(data, range(*ends)) for ends in ((0, 45), (45, 58)))
    return fit(nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), train_set, val_set, run_dir=path, **chosen)


PROGRAMS = {"gpt": train_gpt, "segmenter": train_segmenter, "line": train_line}
