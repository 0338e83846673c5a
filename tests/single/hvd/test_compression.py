"""Compression by itself."""

import pytest
import torch

from lockstep.hvd import Compression
from lockstep.hvd.compression import Compressor, FP16Compressor, sent_dtype


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool]
)
def test_fp16_sends_floats_as_float16_and_restores_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    sent, context = Compression.fp16.compress(tensor)
    assert sent.dtype == (torch.float16 if dtype.is_floating_point else dtype)
    restored = Compression.fp16.decompress(sent, context)
    assert restored.dtype == dtype
    assert restored.equal(tensor)


def test_none_hands_on_the_tensor_itself() -> None:
    tensor = torch.ones(2)
    sent, context = Compression.none.compress(tensor)
    assert sent is tensor
    assert Compression.none.decompress(sent, context) is tensor


def test_compressions_are_classes_that_users_may_derive_from() -> None:
    for compression in (Compression.none, Compression.fp16):
        assert issubclass(compression, Compressor)
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)


def test_only_a_class_that_declares_it_converts_and_nothing_else() -> None:
    """A subclass may override `compress`, which would then be left out."""

    class Clipped(FP16Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.clamp(-1, 1).half(), tensor.dtype

    assert sent_dtype(Compression.fp16) == torch.float16
    assert sent_dtype(Compression.none) is None
    assert sent_dtype(Clipped) is None
    assert sent_dtype(Clipped()) is None  # type: ignore[arg-type]
