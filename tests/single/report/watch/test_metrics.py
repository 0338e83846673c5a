"""What the records say of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.report.watch.metrics import Metrics

Records = Callable[[int], list[dict[str, Any]]]
START = 1_700_000_000.0


def _fed(records: list[dict[str, Any]], **config: Any) -> Metrics:
    metrics = Metrics(config)
    metrics.take_all(records)
    return metrics


def test_progress_curves_and_figures_are_those_of_the_records(records: Records) -> None:
    metrics = _fed(records(2))
    assert (metrics.step, metrics.last_step, metrics.planned_epochs) == (20, 40, 4)
    assert metrics.curve("top1", "val") == [0.1, 0.2]
    assert metrics.curve("loss", "train") == pytest.approx([2**0.5, 1, 0.5**0.5, 0.5])
    assert metrics.latest.items() >= {"lr": 0.1, "data_wait": 0.05, "loss_scale": 1024.0}.items()
    assert metrics.recent_rates == metrics.rates == [105.0, 110.0, 115.0, 120.0]
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
    metrics.take(records(0)[0] | {"step": 40})
    assert (metrics.ending, metrics.is_complete) == ("", False)
    assert metrics.recent_rates == metrics.rates == []


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
    metrics.take_all(good)
    assert (metrics.step, metrics.planned_epochs) == (20, 4)
    assert metrics.recent_rates == metrics.rates == [105.0, 110.0, 115.0, 120.0]


def test_stalled_steps_give_no_time_left(records: Records) -> None:
    steps = [{"kind": "step", "step": 20, "time_seconds": 20.0, "unix_time": START + 20}] * 2
    planned = {"kind": "epoch", "step": 20, "time_seconds": 20.0, "epochs": 4}
    assert _fed([*records(0), planned, *steps]).seconds_left(START + 20) is None


STRAGGLER = {"kind": "straggler", "ranks": [1], "host": "b", "phase": "forward", "seconds": 0.2, "others_seconds": 0.1}


def test_the_newest_straggler_counts_until_a_new_session(records: Records) -> None:
    metrics = _fed([*records(1), STRAGGLER | {"step": 5}, STRAGGLER | {"step": 8}, STRAGGLER | {"step": 9, "ranks": 1}])
    assert metrics.straggler.step == 8
    metrics.take(records(0)[0])
    assert metrics.straggler is None


def test_split_of_a_step_is_a_median_of_the_last_records(records: Records) -> None:
    def step(forward: object) -> dict[str, Any]:
        spread = {"min": 0.0, "median": forward, "max": 0.9, "slowest": 0}
        return {"kind": "step", "step": 1, "time_seconds": 1.0, "phase_spread": {"forward": spread, "other": spread}}

    assert _fed(records(1)).phase_seconds == {}
    metrics = _fed([*records(0), *map(step, (0.1, "x", 0.3, 0.2, None, 2.0))])
    assert metrics.phase_seconds == {"forward": 0.2}
    metrics.take(records(0)[0])
    assert metrics.phase_seconds == {}
