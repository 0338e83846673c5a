"""A sampler that shares out what is left of an epoch anew whenever the number of workers changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sized

from torch.utils.data import Sampler

from lockstep.hvd.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Each worker's share of the samples that no worker has processed in this epoch.

    Put it into the `TorchState`, call `record_batch` after each batch, and `set_epoch` when an epoch is done (not when
    the next one starts: a resumed epoch would begin from its first sample). The order is one shuffle of (seed, epoch),
    the same on every worker; worker r of n takes every n-th sample of what is left, from the r-th on. Where the samples
    do not go round, the first ones left are taken again.

    Attributes:
        epoch: The epoch that is being shared out.
        processed_num: Samples of this epoch that all workers together have processed.
        num_replicas, rank: The workers among whom it is shared out, and which of them this is.
        remaining_indices: What was left of the epoch when it was last shared out.
        num_samples: This worker's share, in samples; `total_size` is that of all workers, repeated samples included.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch: none of its samples is processed."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch that every worker has processed, `batch_size` samples each; `batch_idx` changes nothing."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the workers that there are now."""
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
        return (left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples
