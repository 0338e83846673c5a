"""Which gradients are reduced together: buckets by size, groups by the user's wish."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.hvd.engine.fusion import FUSED_BYTES
from lockstep.hvd.optimizer.buckets import BUCKET_BYTES, plan_buckets
from lockstep.hvd.optimizer.distributed import check_groups

MEBIBYTE = 1 << 20
sizes = st.lists(st.integers(0, 3 * FUSED_BYTES) | st.integers(0, 5000), max_size=60)
limits = st.sampled_from([0, 1, 100, 10_000, FUSED_BYTES, BUCKET_BYTES])


@pytest.mark.parametrize(
    ("sizes_bytes", "limit_bytes", "buckets"),
    [
        ([], BUCKET_BYTES, []),
        ([4, 4, 4], BUCKET_BYTES, [[2, 1, 0]]),
        ([4, 4, 4], 8, [[2, 1], [0]]),
        ([4, 4, 4], 0, [[2], [1], [0]]),
        ([4, 9, 4], 8, [[2], [1], [0]]),
        ([4, FUSED_BYTES, FUSED_BYTES + 1], BUCKET_BYTES, [[2, 1, 0]]),
        ([MEBIBYTE] * 9, 8 * MEBIBYTE, [[8, 7, 6, 5, 4, 3, 2, 1], [0]]),
    ],
)
def test_buckets_go_from_the_last_parameter_to_the_first(
    sizes_bytes: list[int], limit_bytes: int, buckets: list[list[int]]
) -> None:
    assert sorted(plan_buckets(sizes_bytes, limit_bytes)) == sorted(buckets)


@given(sizes, limits)
def test_buckets_hold_all_parameters_and_are_full(sizes_bytes: list[int], limit_bytes: int) -> None:
    buckets = plan_buckets(sizes_bytes, limit_bytes)
    assert [index for bucket in buckets for index in bucket] == list(reversed(range(len(sizes_bytes))))
    totals = [sum(sizes_bytes[index] for index in bucket) for bucket in buckets]
    assert all(len(bucket) == 1 or total <= limit_bytes for bucket, total in zip(buckets, totals, strict=True))
    for total, following in zip(totals, buckets[1:], strict=False):
        assert total + sizes_bytes[following[0]] > limit_bytes


def parameters(count: int, frozen: tuple[int, ...] = ()) -> list[torch.Tensor]:
    return [torch.zeros(2, requires_grad=index not in frozen) for index in range(count)]


@pytest.mark.parametrize(
    ("groups", "count", "indices"),
    [(None, 3, []), (1, 3, [[0, 1, 2]]), (2, 5, [[0, 1], [2, 3, 4]]), (9, 2, [[0], [1]]), (3, 0, [[]])],
)
def test_number_of_groups_cuts_parameters_into_consecutive_ones(
    groups: int | None, count: int, indices: list[list[int]]
) -> None:
    assert check_groups(groups, parameters(count)) == indices


@given(st.integers(1, 20), st.integers(1, 20))
def test_groups_by_number_are_of_nearly_one_size(groups: int, count: int) -> None:
    found = check_groups(groups, parameters(count))
    lengths = [len(group) for group in found]
    assert [index for group in found for index in group] == list(range(count))
    assert len(lengths) == min(groups, count)
    assert max(lengths) - min(lengths) <= 1


def test_frozen_parameters_are_in_no_group() -> None:
    a, b, c, d = all_of_them = parameters(4, frozen=(1, 3))
    assert check_groups([[b], [c, d]], all_of_them) == [[1]]
    assert check_groups([[d, c, a]], all_of_them) == [[0, 1]]  # in the order of all workers
    assert check_groups(2, all_of_them) == [[0], [1]]


TENSOR = torch.zeros(1)


@pytest.mark.parametrize("groups", [0, -1, True, 1.5, "2", (TENSOR,), [TENSOR], [(TENSOR,)], [[1]], {1: [TENSOR]}])
def test_other_groups_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match="groups should be a"):
        check_groups(groups, parameters(2))


@pytest.mark.parametrize("lists", [lambda p: [[p[0], p[0]]], lambda p: [[p[0]], [p[1], p[0]]]])
def test_a_parameter_in_two_places_is_refused(lists: Any) -> None:
    given_parameters = parameters(2)
    with pytest.raises(ValueError, match="only appear once"):
        check_groups(lists(given_parameters), given_parameters)
