"""Random numbers of training (dropout and the like) as a function of (seed, step, rank).

Reseeding before each step costs some 20 µs and makes every step repeatable on its own: a resumed run draws what the
uninterrupted one would have, with no generator's state to save.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's generators for one step of one worker."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(words[0])
    torch_seed = int(words[0]) << 32 | int(words[1])
    # torch.manual_seed would note the whole call stack for each kind of device that is not in use: 200 µs a step.
    torch.default_generator.manual_seed(torch_seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(torch_seed)
