"""The compressions of `lockstep.hvd.compression`."""

from lockstep.hvd.compression import Compression as Compression
from lockstep.hvd.compression import Compressor as Compressor
from lockstep.hvd.compression import FP16Compressor as FP16Compressor
from lockstep.hvd.compression import NoneCompressor as NoneCompressor
