"""Evaluation counts every sample once, whatever the number of workers and the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import train_digits
from worker_group import run_in_workers


@pytest.mark.parametrize("images", [1, 2, 50, 61])
def test_counts_are_exact_for_1_2_and_3_workers(tmp_path: Path, images: int) -> None:
    settings = {"epochs": 1, "global_batch_size": 60, "max_steps": 1, "precision": "fp64"}
    results = []
    for size in (1, 2, 3):
        run = {**settings, "run_dir": tmp_path / str(size)}
        results += run_in_workers(size, train_digits, "plain", 60, images, run)
    assert {result.samples for result in results} == {images}
    assert len({result.top1 for result in results}) == 1
    assert len({result.top5 for result in results}) == 1
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 6, abs=1e-9, rel=0)


def test_workers_stop_after_the_evaluation_on_target(tmp_path: Path) -> None:
    settings = {"epochs": 20, "global_batch_size": 60, "lr": 0.2, "desired_acc": 0.7, "run_dir": tmp_path}
    results = run_in_workers(2, train_digits, "plain", 600, 101, settings)
    assert {result.steps for result in results} == {results[0].steps}
    assert results[0].steps < 200
    assert all(result.top1 >= 0.7 for result in results)
