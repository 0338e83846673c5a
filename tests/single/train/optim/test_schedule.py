"""Schedules of the rate, and how a global batch is cut."""

from __future__ import annotations

import pytest

from lockstep.config.schema import OptimConfig, TrainConfig
from lockstep.train.optim.schedule import Schedule, build_schedule, peak_rate, plan_batches


def test_warmup_climbs_linearly_to_the_peak_on_its_last_step() -> None:
    schedule = Schedule("constant", peak=0.8, total_steps=100, warmup_steps=4)
    assert [schedule.rate(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_cosine_is_halfway_in_the_middle_and_ends_at_its_share() -> None:
    schedule = Schedule("cosine", peak=1.0, total_steps=110, warmup_steps=10, final=0.1)
    assert schedule.rate(10) == pytest.approx(1.0)
    assert schedule.rate(60) == pytest.approx(0.55)
    assert schedule.rate(110) == pytest.approx(0.1)
    assert schedule.rate(500) == pytest.approx(0.1)


def test_onecycle_climbs_a_quarter_then_falls_linearly_to_zero() -> None:
    schedule = build_schedule(OptimConfig(schedule="onecycle"), peak=2.0, epochs=10, steps_per_epoch=40)
    assert schedule.warmup_steps == 100
    assert max(range(400), key=schedule.rate) in (99, 100)
    falls = [schedule.rate(step) - schedule.rate(step + 1) for step in range(100, 399)]
    assert falls == pytest.approx([2.0 / 300] * 299)


def test_step_lowers_at_each_milestone_in_epochs() -> None:
    config = OptimConfig(schedule="step", lr_milestones=(2, 3.5), lr_gamma=0.1)
    schedule = build_schedule(config, peak=1.0, epochs=5, steps_per_epoch=10)
    assert [schedule.rate(step) for step in (19, 20, 34, 35, 49)] == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])


def test_warmup_longer_than_the_run_is_cut_to_it() -> None:
    schedule = build_schedule(OptimConfig(warmup_epochs=5), peak=1.0, epochs=2, steps_per_epoch=10)
    assert schedule.warmup_steps == 20


@pytest.mark.parametrize(("scaling", "rate"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_peak_follows_the_global_batch_and_explains_how(scaling: str, rate: float) -> None:
    peak, reason = peak_rate(OptimConfig(lr=0.1, lr_base_batch=128, lr_scaling=scaling), global_batch=512)  # type: ignore[arg-type]
    assert peak == pytest.approx(rate)
    assert scaling in reason


def test_batch_size_is_per_worker_and_pass() -> None:
    batching = plan_batches(TrainConfig(batch_size=32, accumulate=2), workers=3)
    assert (batching.global_batch, batching.accumulate) == (192, 2)
    assert batching.reason == "32 per worker × 3 workers × 2 accumulated"


def test_global_batch_size_fixes_the_whole() -> None:
    for workers in (1, 2, 3):
        assert plan_batches(TrainConfig(global_batch_size=100), workers).global_batch == 100
