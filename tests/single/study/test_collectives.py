"""Sizes, factors and records of collectives; what they take is measured in tests/parallel."""

from __future__ import annotations

import pytest
import torch

from lockstep.study.collectives import OPERATIONS, SizePoint, recorded, sizes_between
from lockstep.study.figures import Spread


def test_sizes_grow_by_the_factor_up_to_the_largest() -> None:
    assert sizes_between(4, 64, 4) == [4, 16, 64]
    assert sizes_between(4, 63, 4) == [4, 16]
    assert sizes_between(8, 8, 2) == [8]


@pytest.mark.parametrize(
    ("name", "two", "eight"),
    [
        ("all_reduce", 1, 14 / 8),
        ("all_gather", 1 / 2, 7 / 8),
        ("reduce_scatter", 1 / 2, 7 / 8),
        ("all_to_all", 1 / 2, 7 / 8),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
    ],
)
def test_bus_bandwidth_is_as_nccl_tests_defines_it(name: str, two: float, eight: float) -> None:
    factor = OPERATIONS[name].bus_factor
    assert (factor(2), factor(8)) == (two, eight)


@pytest.mark.parametrize("name", OPERATIONS)
def test_expected_values_distinguish_ranks_and_positions(name: str) -> None:
    index = torch.arange(12)
    rank_0, rank_1 = (OPERATIONS[name].expect(rank, 3, index) for rank in (0, 1))
    assert rank_0 is not None
    assert len(rank_0.unique()) > 1
    if name == "all_to_all":
        assert rank_1 is not None
        assert not torch.equal(rank_0, rank_1)
    assert rank_1 is None if name == "reduce" else rank_1 is not None


def test_a_point_without_bandwidth_has_none_in_its_record() -> None:
    point = SizePoint(0, Spread(1.0, 2.0, 3.0), 3, 5)
    assert point.to_mapping() == {
        "size_bytes": 0,
        "seconds": {"low": 1.0, "median": 2.0, "high": 3.0},
        "repeats": 3,
        "calls": 5,
    }


def test_only_complete_records_of_equal_settings_count() -> None:
    settings = {"kind": "collectives", "workers": 2, "sizes_bytes": [4, 16]}
    records = [
        {**settings, "operation": "reduce", "points": []},
        {**settings, "operation": "barrier", "unsupported": "no"},
        {**settings, "operation": "broadcast"},
        {**settings, "workers": 4, "operation": "all_reduce", "points": []},
        {**settings, "sizes_bytes": [4], "operation": "all_gather", "points": []},
        {**settings, "points": []},
        {},
    ]
    assert recorded(iter(records), settings) == {"reduce", "barrier"}
