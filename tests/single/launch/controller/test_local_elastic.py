"""The order of an elastic job's workers, and their places."""

from __future__ import annotations

from typing import Any

from lockstep.launch.controller.local_elastic import SlotWorker, places, ranked


def _worker(slot: int) -> SlotWorker:
    nothing: Any = None
    return SlotWorker(slot, f"localhost/{slot}/0", nothing, nothing)


def test_the_first_workers_are_ranked_by_slot() -> None:
    zero, one, two = workers = [_worker(slot) for slot in range(3)]
    assert ranked([], [two, zero, one]) == workers


def test_survivors_keep_their_order_before_new_workers() -> None:
    zero, one, two = _worker(0), _worker(1), _worker(2)
    again, three = _worker(0), _worker(3)
    second = ranked([zero, one, two], [again, one, two, three])
    assert second == [one, two, again, three]
    assert ranked(second, [three, again, two]) == [two, again, three]


def test_a_local_rank_is_the_slot_so_that_a_survivor_keeps_its_gpu() -> None:
    one, three, again = _worker(1), _worker(3), _worker(0)
    assert places([one, three]) == [
        {"rank": 0, "local_rank": 1, "size": 2},
        {"rank": 1, "local_rank": 3, "size": 2},
    ]
    assert [place["local_rank"] for place in places([one, three, again])] == [1, 3, 0]
