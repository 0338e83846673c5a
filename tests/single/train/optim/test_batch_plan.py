"""The global batch, and the words that explain it."""

from __future__ import annotations

import pytest

from lockstep.config.schema import ParallelConfig, TrainConfig, check_workers
from lockstep.errors import ConfigError
from lockstep.train.optim.batch_plan import plan_batches


def test_batch_size_is_per_worker_and_pass() -> None:
    batching = plan_batches(TrainConfig(batch_size=32, accumulate=2), workers=3)
    assert (batching.global_batch, batching.accumulate) == (192, 2)
    assert batching.reason == "32 per worker × 3 workers × 2 accumulated"


def test_global_batch_size_fixes_the_whole() -> None:
    for workers in (1, 2, 3):
        assert plan_batches(TrainConfig(global_batch_size=100), workers).global_batch == 100


def test_global_batch_without_a_sample_per_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--global-batch-size 5 .* make it 6 or more"):
        check_workers(TrainConfig(global_batch_size=5, accumulate=2), workers=3)


def test_single_is_refused_for_several_workers() -> None:
    with pytest.raises(ConfigError, match="--strategy single"):
        check_workers(TrainConfig(parallel=ParallelConfig(strategy="single")), workers=2)
