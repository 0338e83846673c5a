"""Compression of tensors for communication. To write a custom compression, subclass `Compressor`."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface of a compression. The class itself is passed, not an instance."""

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
