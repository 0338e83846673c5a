"""ElasticSampler against a slow reference, for any number of workers and any change of it."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.hvd.elastic import ElasticSampler


def workers(size: int, samples: int, shuffle: bool = True, seed: int = 0) -> list[ElasticSampler]:
    """The samplers of all workers of a job."""
    samplers = []
    for number in range(size):
        with at(number, size):
            samplers.append(ElasticSampler(range(samples), shuffle, seed))
    return samplers


def at(rank: int, size: int) -> patch:
    """This process is worker `rank` of `size`."""
    return patch.multiple("lockstep.hvd.elastic.sampler", rank=lambda: rank, size=lambda: size)


def dealt_out(left: list[int], size: int) -> list[list[int]]:
    """Deal cards until none is left, and then again from the first ones until everybody has the same number."""
    hands: list[list[int]] = [[] for _ in range(size)]
    cards = left.copy()
    while cards:
        for hand in hands:
            cards = cards or left.copy()
            hand.append(cards.pop(0))
        if len(hands[0]) * size >= len(left):
            break
    return hands


@given(
    samples=st.integers(0, 30),
    size=st.integers(1, 7),
    processed=st.integers(0, 40),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_what_is_left_of_the_shuffle_is_dealt_out(
    samples: int, size: int, processed: int, epoch: int, seed: int, shuffle: bool
) -> None:
    order = list(range(samples))
    if shuffle:
        random.Random(seed + epoch).shuffle(order)
    left = order[processed:]
    for number, (sampler, hand) in enumerate(
        zip(workers(size, samples, shuffle, seed), dealt_out(left, size), strict=True)
    ):
        with at(number, size):
            sampler.load_state_dict({"epoch": epoch, "processed_num": processed})
        assert list(sampler) == hand == list(sampler)
        assert len(sampler) == sampler.num_samples == len(hand)
        assert (sampler.remaining_indices, sampler.total_size) == (left, len(hand) * size)
        assert (sampler.rank, sampler.num_replicas) == (number, size)


@given(samples=st.integers(1, 40), batch=st.integers(1, 5), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_an_epoch_takes_every_sample_however_the_workers_change(samples: int, batch: int, sizes: list[int]) -> None:
    state, taken = {"epoch": 0, "processed_num": 0}, Counter[int]()
    for stay, size in enumerate([*sizes, sizes[0]]):
        group = workers(size, samples)
        for number, sampler in enumerate(group):
            with at(number, size):
                sampler.load_state_dict(state)
        batches = 1 if stay < len(sizes) else samples  # each group but the last changes after one batch
        shares = [list(sampler)[: batch * batches] for sampler in group]
        for share, sampler in zip(shares, group, strict=True):
            taken.update(share)
            for start in range(0, len(share), batch):
                sampler.record_batch(start // batch, len(share[start : start + batch]))
        state = group[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in group)
    assert set(taken) == set(range(samples))
    assert taken.total() == state["processed_num"] < samples + max(sizes)


def test_new_epoch_starts_from_its_first_sample_in_another_order() -> None:
    (sampler,) = workers(1, 20)
    first = list(sampler)
    sampler.record_batch(0, 5)
    with at(0, 1):
        sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (1, 0, 20)
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first


def test_recording_changes_the_shares_at_the_next_reset_only() -> None:
    (sampler,) = workers(1, 8, shuffle=False)
    sampler.record_batch(0, 3)
    assert list(sampler) == list(range(8))
    with at(1, 2):
        sampler.reset()
    assert list(sampler) == [4, 6, 3]


def test_a_sampler_needs_horovod() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        ElasticSampler(range(3))
