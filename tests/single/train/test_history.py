"""Figures of epochs as arrays."""

from __future__ import annotations

import numpy as np

from lockstep.train.history import EpochRecords


def _record(split: str, epoch: int, loss: float, **more: object) -> dict[str, object]:
    return {
        "kind": "epoch",
        "split": split,
        "epoch": epoch,
        "step": 10 * epoch,
        "time_seconds": 1.0,
        "loss": loss,
        **more,
    }


def test_a_record_replaces_those_of_its_epoch_and_later_ones() -> None:
    epochs = EpochRecords()
    epochs.take_all(
        [_record("train", 1, 3.0), _record("val", 1, 4.0), _record("train", 2, 2.0), _record("train", 3, 1.0)]
    )
    epochs.take(_record("train", 2, 1.5))
    history = epochs.history()
    assert history.train["loss"].tolist() == [3.0, 1.5]
    assert history.train["step"].tolist() == [10, 20]
    assert history.val["epoch"].tolist() == [1]


def test_metrics_that_an_epoch_lacks_are_nan() -> None:
    epochs = EpochRecords()
    epochs.take_all(
        [
            _record("val", 1, 4.0),  # before the metrics were added
            _record("val", 2, 3.0, metrics={"f1": None, "recall": [0.5, None]}),
            _record("val", 3, 2.0, metrics={"f1": 0.75, "recall": [0.25, 1.0]}),
        ]
    )
    val, nan = epochs.history().val, float("nan")
    np.testing.assert_array_equal(val["f1"], [nan, nan, 0.75])
    np.testing.assert_array_equal(val["recall"], [[nan, nan], [0.5, nan], [0.25, 1.0]])


def test_an_empty_history_has_its_names() -> None:
    history = EpochRecords().history()
    assert history.train["loss"].shape == history.val["top1"].shape == (0,)
