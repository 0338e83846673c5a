"""Making the next batch while the current one is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lockstep.data.pipeline.prefetch import prefetch
from lockstep.data.sets import Batch

CPU = torch.device("cpu")


class _Made:
    """Counts the batches that were made, and keeps the threads that did."""

    def __init__(self, fail_at: int = 100):
        self.count, self.threads, self._fail_at = 0, set[int](), fail_at
        self.second = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        for number in range(4):
            if number == self._fail_at:
                raise ValueError("no such image")
            self.count += 1
            self.threads.add(threading.get_ident())
            if number == 1:
                self.second.set()
            yield Batch(torch.full((1,), number), torch.zeros(1))


def _numbers(batches: Iterator[Batch]) -> list[float]:
    return [batch.images.item() for batch in batches]


def test_the_next_batch_is_made_while_the_first_is_used() -> None:
    made = _Made()
    batches = prefetch(iter(made), CPU, in_thread=True)
    assert next(batches).images.item() == 0
    assert made.second.wait(20)  # though nobody has asked for it
    assert _numbers(batches) == [1, 2, 3]
    assert threading.get_ident() not in made.threads


@pytest.mark.parametrize(("in_thread", "threads"), [(False, 1), (True, 2)])
def test_else_it_is_made_when_it_is_asked_for(in_thread: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        made = _Made()
        batches = prefetch(iter(made), CPU, in_thread)
        next(batches)
        assert made.count == 1
        assert _numbers(batches) == [1, 2, 3]
        assert made.threads == {threading.get_ident()}
    finally:
        torch.set_num_threads(1)


def test_an_error_comes_with_the_batch_that_it_spoiled() -> None:
    batches = prefetch(iter(_Made(fail_at=2)), CPU, in_thread=True)
    assert [next(batches).images.item(), next(batches).images.item()] == [0, 1]
    with pytest.raises(ValueError, match="no such image"):
        next(batches)


def test_a_pass_that_is_left_leaves_no_thread() -> None:
    before = threading.active_count()
    batches = prefetch(iter(_Made()), CPU, in_thread=True)
    next(batches)
    assert threading.active_count() == before + 1
    del batches
    assert threading.active_count() == before
