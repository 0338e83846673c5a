"""Reproducible random numbers for code that uses the global generators, such as dropout or custom augmentation.

The generators are seeded before each step and each item, so a resumed run draws the same numbers as an uninterrupted
one, and no generator state has to be saved. In a training step on a CPU, this takes 50 µs.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import torch

from lockstep.world import accelerator

AHEAD = 32  # steps whose numbers are hashed together: one alone, between a network's passes, takes 70 µs instead of 8


def seed_all(*numbers: int) -> None:
    """Seed the global generators of Python, NumPy and torch with a hash of nonnegative integers."""
    _seed(*_hash(*numbers))


def seed_step(*numbers: int) -> None:
    """Seed as `seed_all` does, for one step after another; the last two numbers are the step and the rank."""
    *run, step, rank = numbers
    _seed(*_hashes(tuple(run), step // AHEAD, rank)[step % AHEAD])


@lru_cache(maxsize=2)
def _hashes(run: tuple[int, ...], block: int, rank: int) -> list[tuple[int, ...]]:
    return [_hash(*run, step, rank) for step in range(block * AHEAD, (block + 1) * AHEAD)]


def _hash(*numbers: int) -> tuple[int, ...]:
    # NumPy converts other sequences word by word, in as much time as the hash takes.
    words = np.array(numbers, np.uint32) if max(numbers) < 1 << 32 else numbers
    return tuple(map(int, np.random.SeedSequence(words).generate_state(2)))


def _seed(high: int, low: int) -> None:
    random.seed(high)
    np.random.seed(high)
    # Not torch.manual_seed, which records the call stack for each kind of unused device: 200 µs per step.
    torch.default_generator.manual_seed(high << 32 | low)
    accelerator.seed(high << 32 | low)
