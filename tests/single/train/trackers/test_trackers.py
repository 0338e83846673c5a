"""What each tracker makes of a run's records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import TrainConfig
from lockstep.files.jsonl import read_records
from lockstep.train.trackers.base import Tracker, TrackerGroup, scalars
from lockstep.train.trackers.console import PlainConsole, describe
from lockstep.train.trackers.jsonl import RecordTracker

STEP = {
    "kind": "step",
    "step": 20,
    "epoch": 1,
    "loss": 1.5,
    "top1": 0.25,
    "top5": 0.75,
    "samples": 1280,
    "lr": 0.1,
    "images_per_second": 2000.0,
    "data_wait": 0.02,
    "time_seconds": 1.0,
    "unix_time": 1.7e9,
}
VAL = {
    "kind": "epoch",
    "split": "val",
    "step": 23,
    "epoch": 1,
    "epochs": 12,
    "loss": 0.5,
    "top1": 0.875,
    "top5": 1.0,
    "samples": 360,
    "images_per_second": 9000.0,
    "epoch_seconds": 0.04,
    "time_seconds": 1.2,
    "unix_time": 1.7e9,
}
TRAIN = {**VAL, "split": "train", "samples": 1437, "data_wait": 0.5}
EXPECTED = {
    "Loss/train": (20, 1.5),
    "Top1/train": (20, 0.25),
    "Top5/train": (20, 0.75),
    "Throughput/train": (20, 2000.0),
    "DataWait/train": (20, 0.02),
    "Lr": (20, 0.1),
    "Loss/val": (23, 0.5),
    "Top1/val": (23, 0.875),
    "Top5/val": (23, 1.0),
    "Throughput/val": (23, 9000.0),
    "Time/val": (23, 0.04),
    "Time/train": (23, 0.04),
}


def _feed(tracker: Tracker) -> None:
    tracker.begin_epoch(0, 12, 23, 0)
    tracker.advance()
    for record in ({"kind": "run", "step": 0}, STEP, TRAIN, VAL):
        tracker.record(record)
    tracker.close()


def test_tensorboard_has_the_known_tags(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from lockstep.train.trackers.tensorboard import TensorBoardTracker

    _feed(TensorBoardTracker(tmp_path, start_step=0))
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {tag: (events.Scalars(tag)[0].step, events.Scalars(tag)[0].value) for tag in events.Tags()["scalars"]}
    for tag, (step, value) in EXPECTED.items():
        assert found[tag] == (step, pytest.approx(value))


def test_tensorboard_hides_the_steps_that_a_resumed_run_takes_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from lockstep.train.trackers.tensorboard import TensorBoardTracker

    for resumed_after, steps in ((0, (20, 40, 60)), (40, (60, 80))):
        tracker = TensorBoardTracker(tmp_path, resumed_after)
        for step in steps:
            tracker.record({**STEP, "step": step, "loss": float(step + resumed_after)})
        tracker.close()
        time.sleep(1.1 * (resumed_after == 0))  # TensorBoard reads a folder's files by the second in their names
    scalars_of = EventAccumulator(str(tmp_path)).Reload().Scalars("Loss/train")
    assert [(each.step, each.value) for each in scalars_of] == [(20, 20), (40, 40), (60, 100), (80, 120)]


def test_mlflow_gets_parameters_and_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    from lockstep.train.trackers.mlflow import MlflowTracker

    _feed(MlflowTracker(TrainConfig(), tmp_path / "my-run"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert run.info.run_name == "my-run"
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.1"
    assert {tag: run.data.metrics[tag] for tag in EXPECTED} == pytest.approx({t: v for t, (_, v) in EXPECTED.items()})


def test_wandb_gets_the_same_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    from lockstep.train.trackers.wandb import WandbTracker

    _feed(WandbTracker(TrainConfig(), tmp_path))
    wandb.teardown()  # its service process writes the file, and may be late
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while missing := [tag for tag in EXPECTED if tag.encode() not in stored.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib
    import sys

    from lockstep.errors import ConfigError

    monkeypatch.setitem(sys.modules, package, None)
    module = importlib.import_module(f"lockstep.train.trackers.{package}")
    kind: Any = getattr(module, f"{package.capitalize()}Tracker")
    with pytest.raises(ConfigError, match=rf"lockstep-torch\[{package}\]"):
        kind(TrainConfig(), tmp_path)


def test_records_are_kept_whole_and_a_resume_drops_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _feed(RecordTracker(path, start_step=0))
    assert [record["kind"] for record in read_records(path)] == ["run", "step", "epoch", "epoch"]
    RecordTracker(path, start_step=20).close()
    assert [record["kind"] for record in read_records(path)] == ["run", "step"]
    RecordTracker(path, start_step=0).close()  # a new run in an old folder


def test_the_evaluation_of_a_run_that_was_complete_is_not_recorded_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _feed(RecordTracker(path, start_step=0))
    before = path.read_bytes()
    again = RecordTracker(path, start_step=int(VAL["step"]))
    again.record(VAL)
    again.close()
    assert path.read_bytes() == before


def test_a_group_tells_everyone(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    _feed(TrackerGroup([RecordTracker(path, 0) for path in paths]))
    assert paths[0].read_bytes() == paths[1].read_bytes() != b""


def test_metrics_that_are_one_number_are_shown() -> None:
    record = {**VAL, "metrics": {"f1": 0.75, "recall": [0.5, 1.0], "none": None}}
    assert scalars(record) == {**scalars(VAL), "f1/val": 0.75}
    assert describe(record) == f"{describe(VAL)}, f1 0.75"


def test_lines_for_people_have_shares_in_percent() -> None:
    assert "top-1  87.50 %" in describe(VAL)
    assert "360 images" in describe(VAL)
    assert describe(TRAIN).startswith("epoch  1/12  train")
    assert "50 % waiting for data" in describe(TRAIN)


def test_plain_output_has_a_line_every_so_many_steps_and_none_for_the_rest_of_an_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = PlainConsole(10)
    console.begin_epoch(0, 12, 23, 0)
    for step in (10, 20, 23):
        console.record({**STEP, "step": step})
    console.record({**TRAIN, "side": 128})
    lines = capsys.readouterr().out.splitlines()
    figures = "loss  1.5000  top-1  25.00 %  top-5  75.00 %      2,000 images/s, lr 0.1, 2 % waiting for data"
    assert lines[:2] == [f"epoch  1/12  step 10  {figures}", f"epoch  1/12  step 20  {figures}"]
    assert lines[2:] == [f"{describe(TRAIN)}, at 128 pixels"]


def test_the_run_record_has_no_scalars() -> None:
    assert scalars({"kind": "run", "step": 0}) == {}
