"""What requests of several workers have in common, so that they match."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lockstep.hvd.engine.fusion import Allreduce
from lockstep.hvd.engine.request import MAX, PRODUCT, SUM, Collective, kind_of
from lockstep.hvd.ops.broadcast import Broadcast
from lockstep.hvd.ops.rows import Allgather, Alltoall
from lockstep.hvd.ops.submission import Barrier

ONE = torch.ones(3)


@pytest.mark.parametrize(
    "same",
    [
        (Allreduce("x", [ONE], prescale=2), Allreduce("x", [ONE], prescale=2.0)),
        (Allreduce("x", [ONE], in_place=True), Allreduce("x", [ONE])),
        (Allgather("x", [ONE]), Allgather("x", [torch.ones(9)])),
        (Alltoall("x", [ONE], splits=[1, 2]), Alltoall("x", [ONE], splits=[3, 0])),
        (Allreduce("x", [torch.ones(3, 2)]), Allreduce("x", [torch.ones(2, 3).t()])),
        (Allreduce("x", [ONE], operation=SUM), Allreduce("x", [ONE], urgent=True)),
        (Allreduce("x", [ONE], sent_dtype=torch.float16), Allreduce("x", [ONE.half()])),
    ],
)
def test_what_may_differ_does_not_show(same: tuple[Collective, Collective]) -> None:
    assert same[0].entry == same[1].entry


def test_the_dtype_that_is_sent_must_be_the_same() -> None:
    converted = Allreduce("x", [ONE], sent_dtype=torch.float16)
    assert converted.entry != Allreduce("x", [ONE]).entry
    assert converted.size_bytes == 6
    assert converted.describe()["dtypes"] == ["float16"]


def test_another_kind_or_name_is_another_request() -> None:
    keys = {kind(name, [ONE], 1).key for kind in (Allreduce, Broadcast) for name in ("x", "y")}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "request_of_others",
    [
        Allreduce("x.y", [ONE.half()], PRODUCT, 2.0, 0.5),
        Allreduce("group", [torch.ones(2, 3), ONE], MAX, grouped=True),
        Barrier("noname.3"),
        Allreduce("converted", [ONE, ONE.double()], grouped=True, sent_dtype=torch.float16),
    ],
)
def test_a_worker_that_has_joined_matches_by_zeros(request_of_others: Collective) -> None:
    said: dict[str, Any] = json.loads(json.dumps(request_of_others.describe()))
    zeros = kind_of(said).of_zeros(said, torch.device("cpu"))
    assert zeros.entry == request_of_others.entry
    assert all(tensor.count_nonzero() == 0 for tensor in zeros.tensors)
