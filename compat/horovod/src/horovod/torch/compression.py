"""The compressions of `lockstep.hvd.compression`."""

from lockstep.hvd.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
