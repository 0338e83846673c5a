"""What is said of requests that the workers do not agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.hvd.engine.agreement import explain_mismatch
from lockstep.hvd.engine.fusion import Allreduce
from lockstep.hvd.engine.request import AVERAGE, MAX, Members
from lockstep.hvd.ops.broadcast import Broadcast
from lockstep.hvd.ops.rows import Allgather, Alltoall, Reducescatter
from lockstep.hvd.process_sets import Agreement

ONE = torch.ones(3)

TEXTS: list[tuple[tuple[Any, list[Any], dict[str, Any]], tuple[Any, list[Any], dict[str, Any]], str]] = [
    (
        (Allreduce, [ONE], {}),
        (Allreduce, [torch.ones(4)], {}),
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], but another rank sent a tensor of "
        "shape [4].",
    ),
    (
        (Allreduce, [ONE, ONE], {"members": Members.of("bucket 0", list("abcdefg"))}),
        (Allreduce, [ONE, ONE], {"members": Members.of("bucket 0", list("ac"))}),
        "Mismatched parameters: From number 2 on, one rank has b, c, d, e, ..., but another rank has c. Pass the same "
        "parameters in the same order on all workers, and freeze the same ones.",
    ),
    (
        (Allgather, [torch.ones(5, 3)], {}),
        (Allgather, [torch.ones(3, 2)], {}),
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of shape [5, 3], but another rank sent a tensor of "
        "shape [3, 2].",
    ),
    (
        (Alltoall, [ONE], {"splits": [1, 2]}),
        (Alltoall, [torch.ones(3, 1)], {"splits": [1, 2]}),
        "Mismatched ALLTOALL tensor shapes: One rank sent a tensor of rank 1, but another rank sent a tensor of rank 2",
    ),
    (
        (Reducescatter, [ONE], {}),
        (Reducescatter, [ONE.double()], {}),
        "Mismatched data types: One rank had type float32, but another rank had type float64.",
    ),
    (
        (Allreduce, [ONE], {}),
        (Allreduce, [ONE.to("meta")], {}),  # stands for a GPU's
        "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, but another rank specified "
        "device GPU.",
    ),
    (
        (Allreduce, [ONE], {"operation": AVERAGE}),
        (Allreduce, [ONE], {"operation": MAX}),
        "Mismatched reduction operation: One rank specified Average, but another rank specified Max.",
    ),
    (
        (Allreduce, [ONE], {"prescale": 2.0}),
        (Allreduce, [ONE], {"postscale": 0.5}),
        "Mismatched prescale and/or postscale factors: One rank sent factors (2.0, 1.0), but another rank sent factors "
        "(1.0, 0.5).",
    ),
    (
        (Broadcast, [ONE], {"root": 0}),
        (Broadcast, [ONE], {"root": 1}),
        "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.",
    ),
    (
        (Allreduce, [ONE, ONE], {}),
        (Allreduce, [ONE], {}),
        "Mismatched ALLREDUCE group sizes: One rank sent 2 tensors, but another rank sent 1 tensors.",
    ),
    (
        (Allreduce, [ONE], {"grouped": True}),
        (Allreduce, [ONE], {}),
        "Mismatched ALLREDUCE groups: One rank sent a group of tensors, but another rank sent a single tensor.",
    ),
    (
        (Agreement, [], {"terms": ("x", "ranks [0]")}),
        (Agreement, [], {"terms": ("x", "ranks [1]")}),
        "Mismatched x: One rank has ranks [0], but another rank has ranks [1].",
    ),
]


@pytest.mark.parametrize(("one", "other", "text"), TEXTS)
def test_a_mismatch_is_explained_with_name_and_ranks(one: Any, other: Any, text: str) -> None:
    requests = [kind("x", tensors, **details) for kind, tensors, details in (one, one, other)]
    said = explain_mismatch({rank: request.describe() for rank, request in zip((0, 2, 5), requests, strict=True)})
    assert said.startswith(text)
    assert f"'{one[0].kind}.x'" in said
    assert "ranks 0 and 5" in said
    assert requests[0].entry == requests[1].entry != requests[2].entry
    assert len({request.key for request in requests}) == 1
