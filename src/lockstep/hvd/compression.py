"""Compression of tensors for communication. To write a custom compression, subclass `Compressor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch


class Compressor:
    """Interface of a compression. The class itself is passed, not an instance.

    Attributes:
        sent_dtype: If a class sets it, its `compress` converts floating-point tensors to this dtype, and `decompress`
            converts them back, and nothing else. A DistributedOptimizer then calls neither: it converts gradients while
            it copies them to its fusion buffer and back. Does not apply to subclasses of that class.
    """

    sent_dtype: ClassVar[torch.dtype | None] = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor in its original format."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors uncompressed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16."""

    sent_dtype = torch.float16

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The available compressions.

    Attributes:
        none: Send tensors uncompressed.
        fp16: Send floating-point tensors as float16; results have the original dtype.
    """

    none = NoneCompressor
    fp16 = FP16Compressor


def send_compressed(
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    compression: type[Compressor],
) -> list[torch.Tensor]:
    """Call `run`, which returns a result for each tensor, with compressed tensors; return the results decompressed."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = run([tensor for tensor, _ in pairs])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def sent_dtype(compression: type[Compressor]) -> torch.dtype | None:
    """Return the dtype that the compression converts tensors to, if it does nothing else; None otherwise."""
    # A subclass may override `compress`, so only the class that sets the attribute counts.
    dtype: torch.dtype | None = getattr(compression, "__dict__", {}).get("sent_dtype")
    return dtype
