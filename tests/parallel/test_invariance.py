"""World-size invariance: with a fixed global batch, any number of workers takes the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import losses, train_digits
from processes import run_in_workers


def _losses_of(size: int, path: Path, **settings: object) -> list[float]:
    common = {"run_dir": path, "epochs": 1, "global_batch_size": 100, "log_every": 1, "lr": 0.2}
    run_in_workers(size, train_digits, "plain", None, None, {**common, **settings})
    return losses(path)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-5)])
@pytest.mark.parametrize("extra", [{}, {"accumulate": 3, "clip_norm": 0.5, "shift": 1, "label_smoothing": 0.1}])
def test_1_2_and_3_workers_have_the_same_losses(
    tmp_path: Path, precision: str, tolerance: float, extra: dict[str, object]
) -> None:
    runs = [_losses_of(size, tmp_path / str(size), precision=precision, **extra) for size in (1, 2, 3)]
    assert len(runs[0]) == 15  # 1,437 images in steps of 100, the last one of 37
    assert runs[0][-1] < 0.9 * runs[0][0]  # it does learn
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], abs=tolerance, rel=0)


def test_a_worker_without_a_share_of_the_last_step_changes_nothing(tmp_path: Path) -> None:
    runs = []
    for size in (1, 3):
        path = tmp_path / str(size)
        settings = {
            "run_dir": path,
            "epochs": 2,
            "global_batch_size": 12,
            "log_every": 1,
            "precision": "fp64",
        }
        run_in_workers(size, train_digits, "plain", 25, 7, settings)  # steps of 12, 12 and 1
        runs.append(losses(path))
    assert len(runs[0]) == 6
    assert runs[1] == pytest.approx(runs[0], abs=1e-9, rel=0)
