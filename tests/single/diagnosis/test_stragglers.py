"""Which rank is named as slow, from the times of all ranks."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.diagnosis.stragglers import MIN_STEPS, REPORTS, Straggler, StragglerWatch, medians_of_others

STEP = 0.1
seconds = st.floats(0, 100, allow_subnormal=False)


def _named(
    watch: StragglerWatch, forward: list[float], data: list[float] | None = None, step: float = STEP
) -> list[str]:
    times = {"forward": forward, "data_wait": data or [0.001] * len(forward)}
    return [f"{straggler.ranks} {straggler.phase}" for straggler in _update(watch, times, step)]


def _update(
    watch: StragglerWatch, times: dict[str, list[float]], step: float = STEP, steps: int = MIN_STEPS
) -> list[Straggler]:
    return watch.update(times, step, steps, [False] * len(next(iter(times.values()))))


def test_rank_is_named_once_after_three_slow_reports() -> None:
    watch = StragglerWatch(["a", "a", "b", "b"])
    reports = [_update(watch, {"forward": [0.05, 0.05, 0.05, 0.08], "data_wait": [0.01] * 4}) for _ in range(10)]
    (straggler,) = reports[REPORTS - 1]
    assert not any(found for number, found in enumerate(reports) if number != REPORTS - 1)
    assert straggler.describe() == (
        "rank 3 (b) slows all others down: 80 ms per step in the forward pass, where the median of the others is 50 ms"
    )
    assert "temperatures" in straggler.advice


def test_a_rank_that_recovers_in_between_is_not_named() -> None:
    watch = StragglerWatch(["", ""])
    for _ in range(5):
        for forward in ([0.05, 0.08], [0.05, 0.08], [0.05, 0.05]):
            assert not _named(watch, forward)


def test_a_rank_is_named_again_if_another_phase_becomes_slow() -> None:
    watch = StragglerWatch(["", "", ""])
    slow = [_named(watch, [0.05, 0.05, 0.08]) for _ in range(REPORTS)]
    loading = [_named(watch, [0.05] * 3, [0.001, 0.001, 0.08]) for _ in range(REPORTS)]
    assert [*slow, *loading] == [[], [], ["(2,) forward"], [], [], ["(2,) data_wait"]]


def test_slow_ranks_of_one_host_are_named_together() -> None:
    watch = StragglerWatch(["a", "a", "a", "b", "b"])
    for _ in range(REPORTS):
        found = _update(watch, {"backward": [0.01, 0.01, 0.01, 0.03, 0.04]}, 0.05)
    (straggler,) = found
    assert (straggler.ranks, straggler.host) == ((3, 4), "b")
    assert straggler.seconds == pytest.approx(0.04)
    assert straggler.describe().startswith("ranks 3 and 4 (b) slow all others down: 40 ms")


@pytest.mark.parametrize(
    ("forward", "step", "is_named"),
    [
        ([0.010, 0.0126], 0.02, True),
        ([0.010, 0.0119], 0.02, False),  # less than 20 % slower
        ([0.010, 0.0140], 0.2, False),  # a difference that does not matter in a step of this length
        ([0.0, 0.0], 0.0, False),
        ([0.05], 0.05, False),
    ],
)
def test_only_differences_that_matter_are_named(forward: list[float], step: float, is_named: bool) -> None:
    watch = StragglerWatch([""] * len(forward))
    found = [_named(watch, forward, step=step) for _ in range(REPORTS)][-1]
    assert bool(found) == is_named


@given(st.lists(seconds, min_size=2, max_size=9))
def test_the_medians_of_the_others_are_those_of_the_definition(values: list[float]) -> None:
    expected = [median(values[:index] + values[index + 1 :]) for index in range(len(values))]
    assert medians_of_others(values) == pytest.approx(expected)


def test_no_rank_is_named_before_a_hundred_steps() -> None:
    watch = StragglerWatch(["", ""])
    found = [_update(watch, {"forward": [0.05, 0.08]}, steps=16) for _ in range(8)]
    assert [bool(each) for each in found] == [False] * 6 + [True, False]
    (straggler,) = found[6]
    assert (straggler.seconds, straggler.others_seconds) == (pytest.approx(0.08), pytest.approx(0.05))


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_an_oversubscribed_machine_is_named_as_the_cause(oversubscribed: bool) -> None:
    watch = StragglerWatch(["", "", ""])
    for _ in range(REPORTS):
        found = watch.update({"forward": [0.05, 0.05, 0.08]}, STEP, MIN_STEPS, [False, False, oversubscribed])
    (straggler,) = found
    assert straggler.oversubscribed == oversubscribed
    assert ("more busy threads than cores" in straggler.advice) == oversubscribed
