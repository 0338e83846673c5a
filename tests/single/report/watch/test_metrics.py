"""What the records say of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.report.watch.metrics import Metrics, Thinned

Records = Callable[[int], list[dict[str, Any]]]
START = 1_700_000_000.0


def _fed(records: list[dict[str, Any]], **config: Any) -> Metrics:
    metrics = Metrics(config)
    for record in records:
        metrics.add(record)
    return metrics


def test_progress_curves_and_figures_are_those_of_the_records(records: Records) -> None:
    metrics = _fed(records(2))
    assert (metrics.step, metrics.last_step, metrics.epoch, metrics.epochs) == (20, 40, 2.0, 4)
    assert [x for x, _ in metrics.curves["loss", "train"].points] == [0.5, 1.0, 1.5, 2.0]
    assert metrics.curves["top1", "val"].points == [(1.0, 0.1), (2.0, 0.2)]
    assert metrics.curves["loss", "train"].points[1] == (1.0, 1.0)
    assert metrics.top1_after == {10: 0.1, 20: 0.2}
    assert metrics.figures == {"lr": 0.1, "data_wait": 0.05, "loss_scale": 1024.0}
    assert metrics.rate_median == metrics.rate_now == 112.5
    assert (metrics.ending, metrics.is_complete) == ("", False)


def test_time_left_is_that_of_the_steps_left_less_time_passed(records: Records) -> None:
    metrics = _fed(records(2))  # a second a step
    assert metrics.seconds_left(START + 20) == pytest.approx(20)
    assert metrics.seconds_left(START + 27) == pytest.approx(13)
    assert metrics.seconds_left(START + 1000) == 0
    assert _fed(records(2), max_steps=26).seconds_left(START + 20) == pytest.approx(6)
    assert _fed(records(0)).seconds_left(START) is None


def test_last_evaluation_finishes_a_run_until_a_new_session(records: Records) -> None:
    metrics = _fed(records(4))
    assert (metrics.ending, metrics.is_complete) == ("finished", True)
    assert _fed(records(2), max_steps=20).is_complete
    metrics.add(records(0)[0] | {"step": 40})
    assert (metrics.ending, metrics.is_complete) == ("", False)
    assert metrics.rate_now is None


def test_a_stop_and_a_desired_accuracy_end_a_session(records: Records) -> None:
    stopped = _fed([*records(1), {"kind": "stop", "step": 10, "reason": "SIGTERM"}])
    assert (stopped.ending, stopped.is_complete) == ("stopped by SIGTERM", False)
    reached = _fed([*records(1), {"kind": "desired", "step": 10, "desired_acc": 0.9}])
    assert (reached.ending, reached.is_complete) == ("desired accuracy 90 % reached", True)


def test_records_that_lack_something_or_hold_nonsense_do_no_harm(records: Records, nonsense: object) -> None:
    good = records(2)
    broken = [
        {name: value for name, value in record.items() if name != missing} for record in good for missing in record
    ]
    odd = [dict.fromkeys(record, nonsense) | {"kind": record["kind"]} for record in good]
    metrics = _fed([*broken, *odd, {}, {"kind": []}, {"kind": "io"}], max_steps=nonsense, epochs=nonsense)
    assert metrics.last_step is None or 0 <= metrics.last_step < 1e100
    metrics.seconds_left(START)
    for record in good:
        metrics.add(record)
    assert (metrics.step, metrics.epoch, metrics.epochs) == (20, 2.0, 4)
    assert metrics.rate_now == metrics.rate_median == 112.5


def test_stalled_steps_give_no_time_left(records: Records) -> None:
    steps = [{"kind": "step", "step": step, "unix_time": START + step} for step in (20, 20)]
    assert _fed([*records(0), {"kind": "epoch", "epochs": 4}, *steps]).seconds_left(START + 20) is None


STRAGGLER = {"kind": "straggler", "ranks": [1], "host": "b", "phase": "forward", "seconds": 0.2, "others_seconds": 0.1}


def test_the_newest_straggler_counts_until_a_new_session(records: Records) -> None:
    metrics = _fed([*records(1), STRAGGLER | {"step": 5}, STRAGGLER | {"step": 8}, STRAGGLER | {"step": 9, "ranks": 1}])
    assert metrics.straggler is not None
    assert metrics.straggler.step == 8
    metrics.add(records(0)[0])
    assert metrics.straggler is None


def test_split_of_a_step_is_a_median_of_the_last_records(records: Records) -> None:
    def step(forward: object) -> dict[str, Any]:
        spread = {"min": 0.0, "median": forward, "max": 0.9, "slowest": 0}
        return {"kind": "step", "step": 1, "phase_spread": {"forward": spread, "other": spread}}

    assert _fed(records(1)).phase_seconds == {}
    metrics = _fed([*records(0), *map(step, (0.1, "x", 0.3, 0.2, None, 2.0))])
    assert metrics.phase_seconds == {"forward": 0.2}
    metrics.add(records(0)[0])
    assert metrics.phase_seconds == {}


def test_few_points_are_kept_as_they_are() -> None:
    curve = Thinned(most=8)
    assert not curve
    for x in range(7):
        curve.add(x, 10 * x)
    assert curve.points == [(x, 10 * x) for x in range(7)]
    assert curve


@pytest.mark.parametrize("count", [8, 9, 100, 1000, 12_345])
def test_many_points_become_means_in_their_order_up_to_the_last(count: int) -> None:
    curve = Thinned(most=8)
    for x in range(count):
        curve.add(x, 3 * x + 1)
    xs = [x for x, _ in curve.points]
    assert 4 <= len(xs) <= 8
    assert xs == sorted(xs)
    assert all(y == pytest.approx(3 * x + 1) for x, y in curve.points)
    assert xs[0] < 0.2 * count
    assert xs[-1] > 0.7 * count
