"""The search for the largest batch that fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.study.batch_search import next_size


def _search(limit: int, first: int, most: int | None) -> dict[int, bool]:
    found: dict[int, bool] = {}
    while (size := next_size(found, first, most)) is not None:
        assert size not in found
        assert size >= 1
        found[size] = size <= limit
        assert len(found) < 60
    return found


@given(limit=st.integers(1, 10**6), first=st.integers(1, 10**4))
def test_it_ends_within_a_sixteenth_of_the_largest_that_fits(limit: int, first: int) -> None:
    found = _search(limit, first, None)
    largest = max(size for size, fits in found.items() if fits)
    assert largest <= limit < largest + max(1, largest // 16) + 1
    assert any(not fits for fits in found.values())


@given(limit=st.integers(1, 10**4), first=st.integers(1, 100), more=st.integers(0, 1000))
def test_it_never_tries_more_than_the_most(limit: int, first: int, more: int) -> None:
    found = _search(limit, first, first + more)
    assert max(found) <= first + more
    if limit >= first + more:
        assert found[first + more]


def test_where_nothing_fits_it_ends_at_one() -> None:
    found = _search(0, 16, None)
    assert list(found) == [16, 8, 4, 2, 1]
