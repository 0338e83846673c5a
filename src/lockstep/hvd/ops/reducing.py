"""The base class of all-reduce and reduce-scatter: operation, scale factors, and supported dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine.reduction import OPERATION_NAMES, SUM, Reduction
from lockstep.hvd.engine.request import REDUCED_TYPES, Collective


class ReducingCollective(Collective):
    """A collective that reduces.

    Args:
        operation: AVERAGE to PRODUCT.
        prescale: Multiplies the tensors before the reduction.
        postscale: Multiplies the results.
    """

    __slots__ = ("reduction",)
    dtypes = REDUCED_TYPES

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        operation: int = SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        **options: Any,
    ) -> None:
        # Python numbers: 2, 2.0 and NumPy's 2.0 must have the same signature.
        self.reduction = Reduction(int(operation), float(prescale), float(postscale))
        super().__init__(name, tensors, self.reduction, **options)

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        mine, theirs = Reduction(*terms), Reduction(*others)
        if mine.operation != theirs.operation:
            names = OPERATION_NAMES[mine.operation], OPERATION_NAMES[theirs.operation]
            return f"reduction operation: One rank specified {names[0]}, but another rank specified {names[1]}."
        if mine != theirs:
            return (
                f"prescale and/or postscale factors: One rank sent factors {mine[1:]}, but another rank sent factors "
                f"{theirs[1:]}."
            )
        return ""
