"""Figures of epochs as arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.train.monitoring.history import EpochRecords, History


def _record(split: str, epoch: int, loss: float, **more: object) -> dict[str, object]:
    return {"kind": "epoch", "split": split, "epoch": epoch, "step": 10 * epoch, "loss": loss, "top1": 0.5, **more}


def test_a_record_replaces_those_of_its_epoch_and_later_ones() -> None:
    epochs = EpochRecords()
    epochs.extend(
        [_record("train", 1, 3.0), _record("val", 1, 4.0), _record("train", 2, 2.0), _record("train", 3, 1.0)]
    )
    epochs.add(_record("train", 2, 1.5))
    history = epochs.history()
    assert history.train["loss"].tolist() == [3.0, 1.5]
    assert history.train["step"].tolist() == [10, 20]
    assert history.val["epoch"].tolist() == [1]


def test_metrics_that_an_epoch_lacks_are_nan() -> None:
    epochs = EpochRecords()
    epochs.extend(
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


def _history() -> History:
    epochs = EpochRecords()
    for epoch in (1, 2, 3):
        epochs.add(_record("train", epoch, 3.0 / epoch))
        epochs.add(_record("val", epoch, 4.0 / epoch, metrics={"f1": None if epoch == 1 else 0.25 * epoch}))
    return epochs.history()


def test_plot_has_a_panel_per_metric_with_both_splits() -> None:
    plot = _history().plot("f1")
    panels = plot.specification["hconcat"]
    drawn = [[[row["split"], row["x"], row["y"]] for row in panel["data"]["values"]] for panel in panels]
    training = [["training", epoch, 3.0 / epoch] for epoch in (1, 2, 3)]
    assert drawn[0] == [*training, *(["validation", epoch, 4.0 / epoch] for epoch in (1, 2, 3))]
    assert drawn[1] == [[split, epoch, 0.5] for split in ("training", "validation") for epoch in (1, 2, 3)]
    assert drawn[2] == [["validation", 1, None], ["validation", 2, 0.5], ["validation", 3, 0.75]]
    assert all(text in plot._repr_svg_() for text in ("loss", "top-1", "f1", "training", "validation"))


def test_history_without_classes_has_no_accuracy() -> None:
    epochs = EpochRecords()
    record = _record("val", 1, 1.0, metrics={"f1": 0.5})
    epochs.add({name: value for name, value in record.items() if name != "top1"})
    history = epochs.history()
    assert not {"top1", "top5"} & set(history.val)
    assert [panel["encoding"]["y"]["title"] for panel in history.plot("f1").specification["hconcat"]] == ["loss", "f1"]


def test_plot_shows_each_value_of_a_metric() -> None:
    epochs = EpochRecords()
    epochs.add(_record("val", 1, 1.0, metrics={"recall": [0.5, None]}))
    (*_, panel) = epochs.history().plot("recall").specification["hconcat"]
    assert [(row["part"], row["y"]) for row in panel["data"]["values"]] == [(0, 0.5), (1, None)]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<svg"), ("a.PDF", b"%PDF")])
def test_plot_is_saved_by_the_ending_of_its_file(name: str, start: bytes, tmp_path: Path) -> None:
    _history().plot().savefig(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_plot_refuses_another_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.bmp: cannot write a plot in this format; choose \.png, \.svg or \.pdf"):
        _history().plot().savefig(tmp_path / "a.bmp")


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown metric 'f2'; choose from epoch, step, loss, top1"):
        EpochRecords().history().plot("f2")
