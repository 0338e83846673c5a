"""What is said of requests that the workers do not agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.hvd.engine.reduction import AVERAGE, MAX, SUM
from lockstep.hvd.engine.request import Request, explain_mismatch

ONE = torch.ones(3)

TEXTS: list[tuple[tuple[str, list[Any], dict[str, Any]], tuple[str, list[Any], dict[str, Any]], str]] = [
    (
        ("allreduce", [ONE], {}),
        ("allreduce", [torch.ones(4)], {}),
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], but another rank sent a tensor of "
        "shape [4].",
    ),
    (
        ("allgather", [torch.ones(5, 3)], {}),
        ("allgather", [torch.ones(3, 2)], {}),
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of shape [5, 3], but another rank sent a tensor of "
        "shape [3, 2].",
    ),
    (
        ("alltoall", [ONE], {}),
        ("alltoall", [torch.ones(3, 1)], {}),
        "Mismatched ALLTOALL tensor shapes: One rank sent a tensor of rank 1, but another rank sent a tensor of rank 2",
    ),
    (
        ("reducescatter", [ONE], {}),
        ("reducescatter", [ONE.double()], {}),
        "Mismatched data types: One rank had type float32, but another rank had type float64.",
    ),
    (
        ("allreduce", [ONE], {}),
        ("allreduce", [ONE.to("meta")], {}),  # stands for a GPU's
        "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, but another rank specified "
        "device GPU.",
    ),
    (
        ("allreduce", [ONE], {"operation": AVERAGE}),
        ("allreduce", [ONE], {"operation": MAX}),
        "Mismatched reduction operation: One rank said Average, but another rank said Max.",
    ),
    (
        ("allreduce", [ONE], {"prescale": 2.0}),
        ("allreduce", [ONE], {"postscale": 0.5}),
        "Mismatched prescale and/or postscale factors: One rank sent factors (2.0, 1.0), but another rank sent factors "
        "(1.0, 0.5).",
    ),
    (
        ("broadcast", [ONE], {"root": 0}),
        ("broadcast", [ONE], {"root": 1}),
        "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.",
    ),
    (
        ("allreduce", [ONE, ONE], {}),
        ("allreduce", [ONE], {}),
        "Mismatched ALLREDUCE group sizes: One rank sent 2 tensors, but another rank sent 1 tensors.",
    ),
    (
        ("allreduce", [ONE], {"grouped": True}),
        ("allreduce", [ONE], {}),
        "Mismatched ALLREDUCE groups: One rank sent a group of tensors, but another rank sent a single tensor.",
    ),
    (
        ("agreement", [], {"note": "ranks [0]"}),
        ("agreement", [], {"note": "ranks [1]"}),
        "Mismatched x: One rank said ranks [0], another ranks [1].",
    ),
]


@pytest.mark.parametrize(("one", "other", "text"), TEXTS)
def test_a_mismatch_is_explained_with_name_and_ranks(one: Any, other: Any, text: str) -> None:
    requests = [Request(kind, "x", tensors, **details) for kind, tensors, details in (one, one, other)]
    said = explain_mismatch({rank: request.describe() for rank, request in zip((0, 2, 5), requests, strict=True)})
    assert said.startswith(text)
    assert f"'{one[0]}.x'" in said
    assert "ranks 0 and 5" in said
    assert requests[0].entry == requests[1].entry != requests[2].entry
    assert len({request.key for request in requests}) == 1


@pytest.mark.parametrize(
    "same",
    [
        (Request("allreduce", "x", [ONE], prescale=2), Request("allreduce", "x", [ONE], prescale=2.0)),
        (Request("allreduce", "x", [ONE], in_place=True), Request("allreduce", "x", [ONE])),
        (Request("allgather", "x", [ONE]), Request("allgather", "x", [torch.ones(9)])),
        (Request("alltoall", "x", [ONE], splits=[1, 2]), Request("alltoall", "x", [ONE], splits=[3, 0])),
        (Request("allreduce", "x", [torch.ones(3, 2)]), Request("allreduce", "x", [torch.ones(2, 3).t()])),
        (Request("allreduce", "x", [ONE], operation=SUM), Request("allreduce", "x", [ONE], urgent=True)),
    ],
)
def test_what_may_differ_does_not_show(same: tuple[Request, Request]) -> None:
    assert same[0].entry == same[1].entry


def test_another_kind_or_name_is_another_request() -> None:
    keys = {Request(kind, name, [ONE]).key for kind in ("allreduce", "broadcast") for name in ("x", "y")}
    assert len(keys) == 4
