"""The order of an elastic job's workers."""

from __future__ import annotations

from typing import Any

from lockstep.launch.elastic import Worker, ranked


def _worker(slot: int) -> Worker:
    nothing: Any = None
    return Worker(slot, f"localhost/{slot}/0", nothing, nothing)


def test_the_first_workers_are_ranked_by_slot() -> None:
    zero, one, two = workers = [_worker(slot) for slot in range(3)]
    assert ranked([], [two, zero, one]) == workers


def test_survivors_keep_their_order_before_new_workers() -> None:
    zero, one, two = _worker(0), _worker(1), _worker(2)
    again, three = _worker(0), _worker(3)
    second = ranked([zero, one, two], [again, one, two, three])
    assert second == [one, two, again, three]
    assert ranked(second, [three, again, two]) == [two, again, three]
