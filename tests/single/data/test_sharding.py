"""Who sees which sample in which step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sharding import Sharding, evaluation_batches, permutation

SETTINGS = settings(derandomize=True)
SAMPLES, BATCHES, SIZES = st.integers(1, 300), st.integers(1, 80), st.integers(1, 9)


@SETTINGS
@given(samples=SAMPLES, batch=BATCHES, size=SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_shares_are_one_permutation_cut_into_global_batches(
    samples: int, batch: int, size: int, seed: int, epoch: int
) -> None:
    workers = [Sharding(samples, batch, rank, size, seed) for rank in range(size)]
    steps = list(zip(*(worker.epoch(epoch) for worker in workers), strict=True))
    together = [np.concatenate(shares) for shares in steps]
    order = np.concatenate(together)
    assert order.tolist() == permutation(samples, seed, epoch).tolist()
    assert sorted(order.tolist()) == list(range(samples))
    assert len(steps) == workers[0].steps_per_epoch
    assert [len(step) for step in together] == [workers[0].count(step) for step in range(len(steps))]
    assert {len(step) for step in together[:-1]} <= {batch}
    assert 1 <= len(together[-1]) <= batch
    for shares in steps:
        lengths = [len(part) for part in shares]
        assert max(lengths) - min(lengths) <= 1


@SETTINGS
@given(samples=SAMPLES, batch=BATCHES, size=SIZES)
def test_drop_last_skips_a_remainder_but_never_the_only_step(samples: int, batch: int, size: int) -> None:
    workers = [Sharding(samples, batch, rank, size, drop_last=True) for rank in range(size)]
    kept = np.concatenate([part for worker in workers for part in worker.epoch(0)])
    assert len(kept) == len(set(kept.tolist()))
    assert set(kept.tolist()) == set(permutation(samples, 0, 0)[: len(kept)].tolist())
    assert len(kept) == (samples - samples % batch if samples >= batch else samples)
    assert {worker.dropped for worker in workers} == {samples - len(kept)}


@SETTINGS
@given(samples=SAMPLES, batch=BATCHES, size=SIZES, drop_last=st.booleans(), data=st.data())
def test_entering_an_epoch_later_gives_its_tail(
    samples: int, batch: int, size: int, drop_last: bool, data: st.DataObject
) -> None:
    sharding = Sharding(samples, batch, data.draw(st.integers(0, size - 1)), size, seed=3, drop_last=drop_last)
    start = data.draw(st.integers(0, sharding.steps_per_epoch))
    whole, tail = sharding.epoch(2), sharding.epoch(2, start)
    assert [part.tolist() for part in tail] == [part.tolist() for part in whole[start:]]


@SETTINGS
@given(samples=SAMPLES, batch=BATCHES, size=SIZES, together=st.integers(1, 2), most=st.integers(1, 4))
def test_the_smallest_pass_is_that_of_the_workers_shares(
    samples: int, batch: int, size: int, together: int, most: int
) -> None:
    workers = [Sharding(samples, batch, rank, size, together=together, passes_per_step=most) for rank in range(size)]
    for step, shares in enumerate(zip(*(worker.epoch(0) for worker in workers), strict=True)):
        passes = workers[0].passes(step)
        pieces = [len(piece) for part in shares for piece in np.array_split(part if len(part) else [0], passes)]
        assert workers[0].smallest_pass(step) == max(1, min(pieces))
        assert passes == 1 or min(map(len, shares)) >= passes


@SETTINGS
@given(samples=SAMPLES, batch=BATCHES, size=SIZES, together=st.integers(1, 2), most=st.integers(1, 4), data=st.data())
def test_unequal_shares_change_who_gets_a_sample_alone(
    samples: int, batch: int, size: int, together: int, most: int, data: st.DataObject
) -> None:
    speeds = data.draw(st.lists(st.floats(0.01, 1), min_size=size, max_size=size))
    fractions = tuple(speed / sum(speeds) for speed in speeds)
    even = [Sharding(samples, batch, rank, size, 3, False, together, most) for rank in range(size)]
    uneven = [replace(worker, fractions=fractions) for worker in even]
    steps, cut = (list(zip(*(worker.epoch(1) for worker in each), strict=True)) for each in (even, uneven))
    for step, (before, after) in enumerate(zip(steps, cut, strict=True)):
        assert np.concatenate(after).tolist() == np.concatenate(before).tolist()
        assert uneven[0].passes(step) == even[0].passes(step)
        if even[0].smallest_pass(step) >= 2 and together == 1:
            assert min(map(len, after)) >= 2 * even[0].passes(step)
        wanted = [fraction * even[0].count(step) for fraction in fractions]
        if together == 1 and min(wanted) >= max(2 * most, even[0].count(step) // size // 8):
            assert all(abs(len(part) - want) <= 1 for part, want in zip(after, wanted, strict=True))


@SETTINGS
@given(samples=st.integers(0, 300), batch=BATCHES, size=SIZES)
def test_an_evaluation_covers_each_sample_once(samples: int, batch: int, size: int) -> None:
    workers = [evaluation_batches(samples, batch, rank, size) for rank in range(size)]
    assert [int(sample) for worker in workers for part in worker for sample in part] == list(range(samples))
    assert all(1 <= len(part) <= batch for worker in workers for part in worker)
    loads = [sum(map(len, worker)) for worker in workers]
    assert max(loads) - min(loads) <= 1


def test_every_seed_and_every_epoch_has_an_order_of_its_own() -> None:
    orders = [tuple(permutation(100, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert tuple(permutation(100, 3, 4)) == orders[3 * 5 + 4]


def test_every_sample_comes_everywhere_in_the_order() -> None:
    """Over many epochs, each of 8 samples is on each of 8 places about equally often."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[permutation(8, 7, epoch), np.arange(8)] += 1
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 90  # 49 degrees of freedom; 85 is passed once in a thousand


@SETTINGS
@given(samples=st.integers(1, 60), batch=st.integers(1, 25), size=st.integers(1, 5), together=st.integers(1, 3))
def test_adjacent_shares_have_the_same_worker(samples: int, batch: int, size: int, together: int) -> None:
    alone = Sharding(samples, batch, seed=3).epoch(1)
    workers = [Sharding(samples, batch, rank, size, 3, together=together).epoch(1) for rank in range(size)]
    for step, whole in enumerate(alone):
        parts = [worker[step] for worker in workers]
        assert np.array_equal(np.concatenate(parts), whole)
        ends = np.cumsum([len(part) for part in parts])
        assert all(end % together == 0 or end == len(whole) for end in ends)
