"""What are this GPU's limits, in memory bandwidth and in operations per second?

Measured with a copy of some gigabytes (bytes read and written), and with products of large random matrices in bf16 and
fp32. Each limit is the best of three measurements of about half a second, after a warm-up. The clock rate depends on
temperature, so figures to compare with these limits are measured right after them, in the same process.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from gpu.device import DEVICE, seconds_of, size
from gpu.recording import record

ROUNDS = 3


class Limits(NamedTuple):
    """Bytes per second of a copy, and operations per second of a matrix product; a multiply-add counts as two."""

    bytes_per_second: float
    bf16_per_second: float
    fp32_per_second: float

    def __str__(self) -> str:
        return (
            f"memory {self.bytes_per_second / 1e12:.2f} TB/s by a copy; matrix products "
            f"{self.bf16_per_second / 1e12:.0f} TFLOP/s in bf16, {self.fp32_per_second / 1e12:.0f} in fp32 without TF32"
        )


def measure(seconds: float = 0.5) -> Limits:
    """Measure the limits, and free the memory that this needs."""
    return Limits(
        _copies(size(2 << 30, 64 << 20), seconds),
        _products(size(8192, 512), torch.bfloat16, seconds),
        _products(size(4096, 512), torch.float32, seconds),
    )


def _copies(size_bytes: int, seconds: float) -> float:
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size_bytes / min(seconds_of(lambda: target.copy_(source), seconds) for _ in range(ROUNDS))


def _products(side: int, dtype: torch.dtype, seconds: float) -> float:
    first, second = (torch.randn(side, side, device=DEVICE).to(dtype) for _ in range(2))
    result = torch.empty_like(first)
    best = min(seconds_of(lambda: torch.mm(first, second, out=result), seconds) for _ in range(ROUNDS))
    return 2 * side**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float)
    parser.parse_args()
    limits = measure()
    print(limits, flush=True)
    record("limits", **limits._asdict())


if __name__ == "__main__":
    main()
