"""A sampler that redistributes the rest of an epoch when the number of workers changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sized

from torch.utils.data import Sampler

from lockstep.hvd.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Samples this worker's share of the indices that no worker has processed in this epoch.

    Pass it to the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of each epoch (not at
    the start of the next: a resumed epoch would restart from its first sample). The order is a shuffle seeded with
    seed + epoch, the same on all workers; worker r of n takes every n-th of the remaining indices, starting with the
    r-th. If the number of workers does not divide them, the first remaining indices are repeated.

    Attributes:
        epoch: The current epoch.
        processed_num: The number of samples of this epoch that all workers together have processed.
        num_replicas: The number of workers at the last `reset`; `rank`: this worker's.
        remaining_indices: The indices that were left at the last `reset`.
        num_samples: The number of samples for this worker.
        total_size: The number of samples for all workers, including repeated ones.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with no processed samples."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` samples on each worker; `batch_idx` is ignored."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining indices over the current workers."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return (left[position % len(left)] for position in range(self.rank, self.total_size, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples
