"""Stateless random numbers: each draw is a hash of (seed, epoch, sample, purpose).

A sample gets the same draws in any worker, process or batch, and an epoch can be resumed at any step. The hash is the
finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Draws:
    """The draws of N samples in one epoch; `samples` are indices into the data set, int64 [N]."""

    seed: int
    epoch: int
    samples: Indices

    def bits(self, purpose: str) -> npt.NDArray[np.uint64]:
        """Return 64 independent random bits for each sample, uint64 [N]; each `purpose` has its own."""
        return _mix(_mix(self.samples.astype(np.uint64) * _GOLDEN) ^ _key(self.seed, self.epoch, purpose))

    def uniform(self, purpose: str) -> npt.NDArray[np.float64]:
        """Return independent numbers, uniform in [0, 1), float64 [N]; each `purpose` has its own."""
        return (self.bits(purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def between(self, purpose: str, low: float, high: float) -> npt.NDArray[np.float64]:
        """Return numbers uniform in [low, high), float64 [N]."""
        return low + (high - low) * self.uniform(purpose)

    def integers(self, purpose: str, low: int, high: int) -> npt.NDArray[np.int64]:
        """Return uniform integers from low to high, both included, int64 [N]."""
        return low + np.floor(self.uniform(purpose) * (high - low + 1)).astype(np.int64)


@lru_cache(maxsize=256)  # several times the number of purposes per epoch
def _key(seed: int, epoch: int, purpose: str) -> npt.NDArray[np.uint64]:
    key = np.array([crc32(purpose.encode())], np.uint64)
    for part in (seed, epoch):
        key = _mix(key ^ np.uint64(part)) + _GOLDEN
    return key


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))
