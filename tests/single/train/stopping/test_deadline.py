"""When a run asks for a stop: early enough for what it has seen to take long."""

from __future__ import annotations

from lockstep.train.stopping.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now

    def round_of(self, deadline: Deadline, seconds: float, between: float = 0.0) -> bool:
        """One round, and the time to the next; whether a stop was asked for at its beginning."""
        near = deadline.is_near()
        self.now += seconds
        deadline.end_round()
        self.now += between
        return near


def test_without_a_limit_none_comes_near() -> None:
    clock = Clock()
    deadline = Deadline(clock=clock)
    assert not any(clock.round_of(deadline, 1e9) for _ in range(3))


def test_the_stop_leaves_time_for_a_round_a_checkpoint_and_the_reserve() -> None:
    clock = Clock()
    deadline = Deadline(10_000, clock=clock)
    end = clock.now + 10_000
    clock.round_of(deadline, 500)  # compiles
    with deadline.writing():
        clock.now += 40
    rounds = 0
    while not clock.round_of(deadline, 3, between=7):
        rounds += 1
    asked = clock.now - 10
    # A round that asks takes 3 s and the checkpoint 40 s: 60 s and up to one more round (10 s) are left.
    assert 60 <= end - (asked + 3 + 40) < 60 + 2 * 10
    assert rounds > 900


def test_a_first_round_that_is_the_only_one_counts() -> None:
    clock = Clock()
    deadline = Deadline(1000, clock=clock)
    clock.round_of(deadline, 500)
    assert deadline.is_near()  # another two would not fit


def test_of_a_short_time_a_quarter_is_kept() -> None:
    clock = Clock()
    deadline = Deadline(20, clock=clock)
    assert not clock.round_of(deadline, 0.0, between=14.9)
    deadline = Deadline(20, clock=clock)
    clock.now += 15
    assert deadline.is_near()


def test_time_that_is_over_already_is_near() -> None:
    assert Deadline(-5).is_near()
