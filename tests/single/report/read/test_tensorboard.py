"""Older runs, of which only TensorBoard's event files are left."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from report_material import make_events

from lockstep.report.read.run import Run
from lockstep.report.read.sources import gather
from lockstep.report.read.tensorboard import event_files, read_tensorboard


def _read(path: Path) -> tuple[Run | None, list[str]]:
    warnings: list[str] = []
    return read_tensorboard(path, warnings.append), warnings


def test_older_tags_in_any_case_counted_in_epochs_and_percent(tmp_path: Path) -> None:
    folder = make_events(
        tmp_path / "old-run",
        {
            "top1/val": [(0, 110.0, 40.0), (1, 120.0, 60.0)],
            "Top5/Val": [(0, 110.0, 80.0), (1, 120.0, 90.0)],
            "Time/train": [(0, 109.0, 9.0), (1, 119.0, 9.0)],
            "throughput/train": [(0, 109.0, 500.0), (1, 119.0, 520.0)],
            "LR": [(0, 109.0, 0.1), (1, 119.0, 0.01)],
            "Gpu/heat": [(0, 109.0, 70.0)],
        },
    )
    run, warnings = _read(folder)
    assert run is not None
    assert run.name == "old-run"
    top1 = run.epochs["top1", "val"]
    assert (list(top1.epochs), list(top1.seconds)) == ([1, 2], [10, 20])  # the first epoch began at 100
    assert list(top1.values) == pytest.approx([0.4, 0.6])
    assert list(run.epochs["top5", "val"].values) == pytest.approx([0.8, 0.9])
    assert list(run.steps["lr"].values) == pytest.approx([0.1, 0.01])
    assert run.images_per_second == pytest.approx(510)
    assert run.train_seconds == pytest.approx(18)  # without what evaluations took
    (warning,) = warnings
    assert warning.startswith(f"{folder}: skipped scalars Gpu/heat; known are lr, and loss, accuracy,")


@pytest.mark.parametrize(
    ("tags", "metric", "split"),
    [
        ("Acc/val val/accuracy val_acc accuracy/val Accuracy/Validation eval/accuracy valAcc test-acc1", "top1", "val"),
        ("val/sparse_categorical_accuracy val/top1_acc Acc@1/val validation/accuracy_top-1", "top1", "val"),
        ("Top-5/val val_acc5 val/top5_accuracy", "top5", "val"),
        ("train/loss Loss/train train_loss training_loss train_loss_epoch loss TrainLoss", "loss", "train"),
        ("val/loss eval/loss Loss/test val_loss_epoch", "loss", "val"),
        ("Throughput/train train/train_samples_per_second", "images_per_second", "train"),
    ],
)
def test_a_phase_and_a_metric_make_a_tag_known(tags: str, metric: str, split: str, tmp_path: Path) -> None:
    for number, tag in enumerate(tags.split()):
        run, _ = _read(make_events(tmp_path / str(number), {tag: [(1, 1.0, 0.5)]}))
        assert run is not None, tag
        assert [*run.epochs] == [(metric, split)], tag


@pytest.mark.parametrize(
    "tag", ["lr", "Lr", "learning_rate", "train/learning_rate", "lr-Adam/pg1", "epoch_learning_rate"]
)
def test_any_learning_rate_is_known(tag: str, tmp_path: Path) -> None:
    run, _ = _read(make_events(tmp_path, {tag: [(1, 1.0, 0.5)]}))
    assert run is not None
    assert [*run.steps] == ["lr"]


def test_tags_are_listed_if_none_is_known(tmp_path: Path) -> None:
    tags = ["reward", "accuracy", "train/step_time", "train/mask_loss", "train/epoch", "val/f1"]
    run, warnings = _read(make_events(tmp_path, {tag: [(1, 1.0, 0.5)] for tag in tags}))
    assert run is None
    (warning,) = warnings
    assert f"no known scalars; found {', '.join(sorted(tags))}; known are lr, and loss, accuracy" in warning


def test_steps_and_epochs_of_one_loss_are_apart(tmp_path: Path) -> None:
    """As written by Lightning."""
    steps, epochs = ([(step, float(step), 1.0) for step in range(every, 21, every)] for every in (5, 10))
    tags = {"train_loss_step": steps, "train_loss_epoch": epochs, "val_acc": epochs, "epoch": steps}
    run, warnings = _read(make_events(tmp_path, tags))
    assert run is not None
    assert list(run.steps["loss"].epochs) == [0.5, 1, 1.5, 2]
    assert {key: list(curve.epochs) for key, curve in run.epochs.items()} == {
        ("loss", "train"): [1, 2],
        ("top1", "val"): [1, 2],
    }
    assert len(warnings) == 1


def test_of_tags_with_the_same_meaning_the_longest_counts(tmp_path: Path) -> None:
    """As written by Hugging Face's Trainer, which adds the mean of the training loss."""
    points = [(step, float(step), 1.0) for step in (1, 2, 3)]
    run, warnings = _read(make_events(tmp_path, {"train/train_loss": points[-1:], "train/loss": points}))
    assert run is not None
    assert len(run.epochs["loss", "train"]) == 3
    assert "skipped scalars train/train_loss" in warnings[0]


def test_folders_of_phases_are_one_run(tmp_path: Path) -> None:
    points = [(epoch, float(epoch), 0.5) for epoch in range(3)]
    for phase in ("train", "validation"):  # as written by Keras
        make_events(tmp_path / "keras" / phase, {"epoch_loss": points, "epoch_accuracy": points})
        make_events(tmp_path / "torch" / f"Loss_{phase}", {"Loss": points})  # as written by add_scalars
    make_events(tmp_path / "torch", {"lr": points})
    make_events(tmp_path / "others" / "train-a", {"train/loss": points})
    make_events(tmp_path / "others" / "train-b", {"train/loss": points})
    runs = {run.name: run for run in gather([tmp_path]).runs}
    assert sorted(runs) == ["keras", "torch", "train-a", "train-b"]
    assert sorted(runs["keras"].epochs) == [(m, s) for m in ("loss", "top1") for s in ("train", "val")]
    assert sorted(runs["torch"].epochs) == [("loss", "train"), ("loss", "val")]


def test_lockstep_tags_are_counted_in_optimizer_steps(tmp_path: Path) -> None:
    folder = make_events(
        tmp_path / "mine" / "tensorboard",
        {
            "Top1/train": [(step, 100.0 + step, 0.1) for step in (5, 10, 15, 20)],
            "Top1/train_epoch": [(10, 110.0, 0.3), (20, 120.0, 0.4)],
            "Top1/val": [(10, 111.0, 0.5), (20, 121.0, 0.6)],
        },
    )
    run, warnings = _read(folder)
    assert run is not None
    assert not warnings
    assert run.name == "mine"
    assert list(run.steps["top1"].epochs) == [0.5, 1, 1.5, 2]
    assert list(run.epochs["top1", "train"].values) == pytest.approx([0.3, 0.4])
    assert list(run.epochs["top1", "val"].epochs) == [1, 2]
    assert list(run.epochs["top1", "val"].values) == pytest.approx([0.5, 0.6])
    assert run.train_seconds is None  # no Time/train


def test_training_in_steps_beside_evaluations_in_epochs(tmp_path: Path) -> None:
    training = [(step, 100.0 + step, 1.0) for step in range(1, 101)]
    run, _ = _read(make_events(tmp_path, {"Loss/train": training, "Loss/val": [(1, 150.0, 2.0), (2, 200.0, 1.5)]}))
    assert run is not None
    loss = run.epochs["loss", "train"]
    assert (loss.epochs[49], loss.epochs[-1]) == (1, 2)


@pytest.mark.parametrize("steps_an_epoch", [1, 10])
@pytest.mark.parametrize("tag", ["Time/train", "Loss/train_epoch"])
def test_evaluations_every_five_epochs_stand_at_their_epochs(tag: str, steps_an_epoch: int, tmp_path: Path) -> None:
    training = [(epoch * steps_an_epoch, 100.0 + epoch, 1.0) for epoch in range(1, 16)]
    validation = [(epoch * steps_an_epoch, 100.5 + epoch, epoch / 20) for epoch in (5, 10, 15)]
    run, warnings = _read(make_events(tmp_path, {tag: training, "Top1/val": validation}))
    assert run is not None
    assert list(run.epochs["top1", "val"].epochs) == [5, 10, 15]
    assert run.done_epochs == 15
    assert not warnings


def test_epochs_counted_from_evaluations_are_called_a_guess(tmp_path: Path) -> None:
    _, warnings = _read(make_events(tmp_path, {"Top1/val": [(step, float(step), 0.5) for step in (5, 10, 15)]}))
    assert len(warnings) == 1
    assert "epochs are estimated" in warnings[0]


def test_accuracies_in_percent_are_known_by_any_value(tmp_path: Path) -> None:
    run, _ = _read(make_events(tmp_path, {"Top1/val": [(1, 1.0, math.nan), (2, 2.0, 50.0)]}))
    assert run is not None
    assert run.epochs["top1", "val"].values[1] == pytest.approx(0.5)


def test_the_best_epoch_of_a_long_run_is_not_averaged(tmp_path: Path) -> None:
    points = [(epoch, float(epoch), 0.9 if epoch == 777 else 0.5) for epoch in range(1, 5_001)]
    run, _ = _read(make_events(tmp_path, {"Top1/val": points}))
    assert run is not None
    assert max(run.epochs["top1", "val"].values) == pytest.approx(0.9)


def test_no_point_of_a_long_file_is_left_out(tmp_path: Path) -> None:
    points = [(step, float(step), 1.0 if step == 777 else 0.0) for step in range(1, 25_001)]
    run, _ = _read(make_events(tmp_path, {"Lr": points}))
    assert run is not None
    assert len(run.steps["lr"]) == 2_000
    assert sum(run.steps["lr"].values) == pytest.approx(1 / 12.5, rel=0.1)  # the one step, averaged with its stretch


def test_of_a_step_that_was_taken_twice_the_later_counts(tmp_path: Path) -> None:
    points = [(1, 10.0, 0.1), (2, 20.0, 0.2), (3, 30.0, 0.3), (2, 40.0, 0.4), (3, 50.0, 0.5)]
    run, _ = _read(make_events(tmp_path, {"Top1/val": points}))
    assert run is not None
    assert list(run.epochs["top1", "val"].values) == pytest.approx([0.1, 0.4, 0.5])


def test_a_file_that_ends_within_an_event_is_read_and_said(tmp_path: Path) -> None:
    folder = make_events(tmp_path, {"Top1/val": [(1, 1.0, 0.5), (2, 2.0, 0.6)]})
    (file,) = event_files(folder)
    file.write_bytes(file.read_bytes()[:-7])
    for path in (folder, file):
        run, warnings = _read(path)
        assert run is not None
        assert list(run.epochs["top1", "val"].values) == pytest.approx([0.5])
        assert "bytes, an incomplete event" in warnings[0]


def test_zeros_after_the_events_are_passed_over_at_once(tmp_path: Path) -> None:
    """As a file system leaves them where the machine crashed, and without end in a sparse file."""
    folder = make_events(tmp_path, {"Top1/val": [(1, 1.0, 0.5)]})
    (file,) = event_files(folder)
    os.truncate(file, 1 << 40)
    run, warnings = _read(folder)
    assert run is not None
    assert "bytes, an incomplete event" in warnings[0]
    assert list(run.epochs["top1", "val"].values) == pytest.approx([0.5])


def test_files_of_anything_else_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_text("this is no event file, but is long enough for a header")
    run, warnings = _read(tmp_path)
    assert run is None
    assert "an incomplete event" in warnings[0]
    assert "no known scalars; found none; known are" in warnings[-1]


def test_a_tensor_that_claims_a_size_is_passed_over(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1 << 40)])
    bomb = TensorProto(dtype="DT_FLOAT", tensor_shape=shape, float_val=[1.0])
    writer = EventFileWriter(str(tmp_path))
    writer.add_event(
        Event(step=1, wall_time=1.0, summary=Summary(value=[Summary.Value(tag="loss/train", tensor=bomb)]))
    )
    writer.close()
    warnings: list[str] = []
    assert read_tensorboard(tmp_path, warnings.append) is None
    assert "no known scalars" in warnings[0]
