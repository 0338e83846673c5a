"""What the states of several workers say: rules, each alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.diagnosis.observed_steps import TrainedState
from lockstep.script_check.state_comparison import ALONE_STEPS, StateComparison

SAME = TrainedState(10, 1, 2, 3, 4, 5, 6, 7, exchanges=1, is_wrapped=True, is_joined=True, line="train.py:31")


def _compare(*changes: dict[str, object], comparison: StateComparison | None = None) -> list[str]:
    states = [replace(SAME, **each) for each in changes]  # type: ignore[arg-type]
    return (comparison or StateComparison(len(states))).compare(states)


APART: dict[str, object] = {"is_wrapped": False, "exchanges": 0}
OWN = {"weights": 20, "gradients": 30}
RULES = (
    ({}, {}, ""),
    ({}, OWN, "the loss bypasses the wrapper"),
    ({}, {**OWN, "processor": 8}, ""),  # they may round differently
    ({}, {"weights": 20}, "changed weights or optimizer state alone"),
    ({}, {"weights": 20, "began": 9}, "they differed before the first step"),
    ({"rate": 0.1}, {"weights": 20, "settings": 9, "rate": 0.2}, "differ (learning rates 0.1, 0.2)"),
    ({}, {"weights": 20, "settings": 9, "exchanges": 2}, "a worker has skipped a step, or the settings"),
    ({"is_wrapped": False}, {**OWN, "is_wrapped": False}, ""),  # averages from time to time, or parts of a model
    (APART, {**APART, **OWN}, ""),  # may still average at the end of the epoch
    ({**APART, "epochs": 2}, {**APART, **OWN, "epochs": 2}, "exchanged nothing since the first step"),
    ({**APART, "step": ALONE_STEPS}, {**APART, **OWN, "step": ALONE_STEPS}, "exchanged nothing"),
    ({**APART, "is_joined": False}, {**APART, **OWN, "is_joined": False}, "they have no process group"),
    ({**APART, "is_joined": False}, {**APART, **OWN, "is_joined": False, "began": 9}, ""),  # other seeds
    ({**APART, "is_joined": False}, {**APART, "weights": 20, "began": 9, "is_joined": False}, ""),
    ({"repeats_order": True}, {"repeats_order": True}, "call sampler.set_epoch(epoch)"),
)


@pytest.mark.parametrize(("one", "other", "words"), RULES)
def test_only_what_is_certain_is_reported(one: dict[str, object], other: dict[str, object], words: str) -> None:
    found = _compare(one, other)
    assert len(found) == bool(words)
    assert not found or words in found[0]
    assert not found or found[0].startswith(f"after step {one.get('step', 10):,} (train.py:31), ")


def test_the_worker_that_differs_from_the_others_is_named() -> None:
    (found,) = _compare({}, {}, OWN)
    assert "the weights of rank 2 differ from those of the others" in found


def test_each_kind_is_reported_once() -> None:
    comparison = StateComparison(2)
    assert [len(_compare({"step": step}, {**OWN, "step": step}, comparison=comparison)) for step in (10, 100)] == [1, 0]


def test_equal_samples_are_reported_after_three_different_ones() -> None:
    comparison = StateComparison(2)
    found = [
        _compare(*[{"step": step, "samples": step // 200}] * 2, comparison=comparison) for step in range(100, 900, 100)
    ]
    assert [len(each) for each in found] == [0, 0, 0, 0, 0, 1, 0, 0]  # of no loader (0), then of three batches


@pytest.mark.parametrize("own", [{"loss": 50}, {"weights": 20, "is_wrapped": False, "gradients": 30}])
def test_equal_samples_trained_on_otherwise_are_no_fault(own: dict[str, object]) -> None:
    """Each trains on a part of the batch, or holds a part of the model."""
    comparison = StateComparison(2)
    changes = [({}, own), *[({}, {})] * 5]
    for step, (one, other) in enumerate(changes, 1):
        each = {"step": step, "samples": step}
        assert not _compare({**one, **each}, {**other, **each}, comparison=comparison)


def test_workers_are_compared_once_all_have_reached_a_step() -> None:
    comparison = StateComparison(2)
    for one, other in ((100, 0), (200, 0), (300, 200)):
        found = comparison.compare([replace(SAME, step=one), replace(SAME, step=other, weights=20 * (other > 0))])
        assert len(found) == (other == 200)


def test_another_training_is_compared_from_its_first_step() -> None:
    comparison = StateComparison(2)
    for one, other in ((1000, 900), (10, 10), (900, 800)):  # the first training ended before one reached step 1000
        earlier = {"weights": 20} if one == 1000 else {}
        assert not _compare({"step": one}, {**earlier, "step": other}, comparison=comparison)
    (found,) = _compare({"step": 950}, {"step": 950, "weights": 20}, comparison=comparison)
    assert found.startswith("after step 950 ")
