"""What each tracker makes of a run's records."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from time_limits import wait_until

from lockstep.config.schema import RunConfig, TrainConfig
from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.run.records import tracking_services
from lockstep.run.records.trackers import (
    ALWAYS,
    COLUMNS,
    DETAIL,
    PlainConsole,
    RecordTracker,
    TerminalConsole,
    Tracker,
    describe,
    describe_both,
    describe_steps,
    scalars,
)
from lockstep.run.records.tracking_services import MlflowTracker, TensorBoardTracker, WandbTracker

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
    _feed(TensorBoardTracker(tmp_path, start_step=0))
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {tag: (events.Scalars(tag)[0].step, events.Scalars(tag)[0].value) for tag in events.Tags()["scalars"]}
    for tag, (step, value) in EXPECTED.items():
        assert found[tag] == (step, pytest.approx(value))


def test_tensorboard_hides_steps_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    for resumed_after, steps in ((0, (20, 40, 60)), (40, (60, 80))):
        tracker = TensorBoardTracker(tmp_path, resumed_after)
        for step in steps:
            tracker.record({**STEP, "step": step, "loss": float(step + resumed_after)})
        tracker.close()
        time.sleep(1.1 * (resumed_after == 0))  # TensorBoard reads a folder's files by the second in their names
    scalars_of = EventAccumulator(str(tmp_path)).Reload().Scalars("Loss/train")
    assert [(each.step, each.value) for each in scalars_of] == [(20, 20), (40, 40), (60, 100), (80, 120)]


def test_readonly_tensorboard_folder_causes_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    tracker = TensorBoardTracker(tmp_path, 0, told.append)
    tracker.record({**STEP, "step": 20})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for step in (40, 60):
        tracker.record({**STEP, "step": step})
    tracker.close()
    assert told == [f"{tmp_path} cannot be written: read-only; metrics.jsonl is complete"]


def test_invalid_tensorboard_name_costs_only_its_events(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / os.fsdecode(b"run\xff")
    tracker = TensorBoardTracker(folder, 0, told.append)
    tracker.record({**STEP, "step": 20})
    tracker.close()
    assert told == [
        f"{folder} cannot be written: TensorBoard needs a path that is valid UTF-8; metrics.jsonl is complete"
    ]


@pytest.mark.filterwarnings("ignore:codecs.open")  # of MLflow, with Python 3.14
def test_mlflow_gets_parameters_and_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    _feed(MlflowTracker(TrainConfig(), tmp_path / "my-run"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert run.info.run_name == "my-run"
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.1"
    assert {tag: run.data.metrics[tag] for tag in EXPECTED} == pytest.approx({t: v for t, (_, v) in EXPECTED.items()})


@pytest.mark.parametrize("address", ["ftp://host/store", "./mlruns"])  # unknown; MLflow 3 refuses folders by default
@pytest.mark.parametrize("has_databases", [True, False])
def test_an_unusable_mlflow_store_is_one_error_with_the_fix(
    address: str, has_databases: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    if has_databases:
        (tmp_path / "sqlalchemy.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ConfigError, match=r"^--track mlflow: .*set MLFLOW_TRACKING_URI") as error:
        MlflowTracker(TrainConfig(), tmp_path)
    assert ("lockstep-torch[mlflow]" in str(error.value)) is not has_databases


def test_wandb_without_an_account_is_one_error_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--track wandb: No API key .* WANDB_MODE=offline"):
        WandbTracker(TrainConfig(), tmp_path)
    wandb.teardown()  # keeps the environment variables that it has read


def test_wandb_gets_the_same_figures_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    _feed(WandbTracker(TrainConfig(), tmp_path))
    wandb.teardown()  # its service process writes the file, and may be late
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    wait_until(lambda: all(tag.encode() in stored.read_bytes() for tag in EXPECTED))


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    kind: Any = getattr(tracking_services, f"{package.capitalize()}Tracker")
    with pytest.raises(ConfigError, match=rf"lockstep-torch\[{package}\]"):
        kind(TrainConfig(), tmp_path)


def test_records_stay_whole_and_a_resume_drops_repeated_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _feed(RecordTracker(path, start_step=0))
    assert [record["kind"] for record in read_records(path)] == ["run", "step", "epoch", "epoch"]
    RecordTracker(path, start_step=20).close()
    assert [record["kind"] for record in read_records(path)] == ["run", "step"]
    RecordTracker(path, start_step=0).close()  # a new run in an old folder


def test_a_resume_keeps_the_energy_of_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"kind": "{kind}", "step": {step}}}\n' for kind in ("step", "energy") for step in (5, 9))
    )
    RecordTracker(path, start_step=4).close()
    assert [(record["kind"], record["step"]) for record in read_records(path)] == [("energy", 5), ("energy", 9)]


def test_evaluation_of_a_complete_run_is_not_recorded_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _feed(RecordTracker(path, start_step=0))
    before = path.read_bytes()
    again = RecordTracker(path, start_step=int(VAL["step"]))
    again.record(VAL)
    again.close()
    assert path.read_bytes() == before


def test_metrics_that_are_one_number_are_shown() -> None:
    record = {**VAL, "metrics": {"f1": 0.75, "recall": [0.5, 1.0], "none": None}}
    assert scalars(record) == {**scalars(VAL), "f1/val": 0.75}
    assert "  f1 0.75  " in describe(record, top5=True)
    assert "recall" not in describe(record, top5=True)


def test_lines_for_people_have_shares_in_percent() -> None:
    assert "top-1  87.50 %" in describe(VAL, top5=True)
    assert "360 images" in describe(VAL, top5=True)
    assert describe(TRAIN, top5=True).startswith("epoch  1/12  train")
    assert "wait 50 %" in describe(TRAIN, top5=True)


def test_top5_is_left_out_where_there_are_ten_classes_or_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    for classes in (10, 11):
        _feed(PlainConsole(RunConfig(), classes))
    ten, eleven = (block.splitlines() for block in capsys.readouterr().out.split("epoch  1/12  step  20")[1:])
    assert ["top-5" in line for line in ten] == [False, False, False]
    assert ["top-5" in line for line in eleven] == [False, True, True]


def test_records_without_classes_show_no_accuracy() -> None:
    train, val, step = ({key: each[key] for key in each if key not in ("top1", "top5")} for each in (TRAIN, VAL, STEP))
    lines = [
        describe(val, top5=True, noun="samples"),
        describe_both(train, val, top5=True, noun="samples"),
        describe_steps("epoch 1/2", step, 2, noun="samples"),
    ]
    assert all("samples" in line and "top" not in line and "images" not in line for line in lines), lines
    for record in (train, val, step):
        assert not any(name.startswith("Top") for name in scalars(record))
        assert "Loss" in str(scalars(record))


@pytest.mark.parametrize("extreme", [False, True])
def test_lines_fit_into_100_columns(extreme: bool) -> None:
    large: dict[str, Any] = {
        "step": 12_345_678,
        "epoch": 1000,
        "epochs": 1000,
        "loss": 123456.789,
        "top1": 1.0,
        "images_per_second": 12_345_678.0,
        "samples": 14_197_122,
        "epoch_seconds": 123_456.0,
        "data_wait": 1.0,
        "lr": 1.234e-05,
    }
    more = large if extreme else {"epochs": 90, "epoch": 9, "step": 450_360, "epoch_seconds": 978.2, "samples": 50_000}
    train, val, step = {**TRAIN, **more}, {**VAL, **more}, {**STEP, **more}
    lines = [
        describe(train, top5=True),
        describe(val, top5=True),
        describe_both(train, val, top5=True),
        describe_steps("epoch 1000/1000", step, 10),
    ]
    assert all(len(line) <= COLUMNS for line in lines), lines
    assert extreme or lines[0].endswith("978 s  wait 50 %")  # nothing had to be left out


def test_plain_output_has_one_line_per_log_interval(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(RunConfig(log_every=10), classes=10)
    console.begin_epoch(0, 12, 23, 0)
    for step in (10, 20, 23):
        console.record({**STEP, "step": step})
    console.record(TRAIN)
    lines = capsys.readouterr().out.splitlines()
    figures = "loss 1.5000  top-1  25.00 %    2,000 images/s  lr 0.1  wait 2 %"
    assert lines[:2] == [f"epoch  1/12  step  10  {figures}", f"epoch  1/12  step  20  {figures}"]
    assert lines[2:] == [describe(TRAIN, top5=False)]


def test_epoch_within_one_log_interval_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _feed(PlainConsole(RunConfig(log_every=23), classes=10))
    assert capsys.readouterr().out.splitlines() == [
        "epoch  1/12  loss 0.5000  top-1  87.50 %  val loss 0.5000  top-1  87.50 %    9,000 images/s  0.0 s"
    ]
    stopped = PlainConsole(RunConfig(log_every=23), classes=10)
    stopped.begin_epoch(0, 12, 23, 0)
    stopped.record(TRAIN)
    stopped.close()
    assert capsys.readouterr().out.splitlines() == [describe(TRAIN, top5=False)]


@pytest.mark.parametrize(
    ("run", "lines"),
    [
        (RunConfig(log_every=23, quiet=True), ["result"]),
        (RunConfig(log_every=23), ["note", "result", "epoch"]),
        (RunConfig(log_every=23, verbose=True), ["detail", "note", "result", "epoch"]),
        (RunConfig(log_every=5), ["note", "result", "epoch", "epoch", "val"]),
        (RunConfig(log_every=5, quiet=True), ["result"]),
        (RunConfig(log_every=20, verbose=True), ["detail", "note", "result", "epoch", "epoch", "val"]),
    ],
)
def test_quiet_and_verbose_print_less_and_more(
    run: RunConfig, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    console = PlainConsole(run, classes=10)
    console.say("detail", DETAIL)
    console.say("note")
    console.say("result", ALWAYS)
    _feed(console)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == lines


def test_terminal_has_only_epoch_lines_and_a_progress_bar() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    console = TerminalConsole(RunConfig(log_every=5), 10, screen)
    console.begin_epoch(0, 12, 7, 2)
    console.advance()
    console.record(STEP)
    (task,) = console._progress.tasks
    assert (task.description, task.completed, task.total) == ("epoch  1/12", 3, 7)
    assert task.fields["figures"] == "loss 1.500  2,000 images/s"
    console.record(TRAIN)
    console.record(VAL)
    console.close()
    assert not console._progress.tasks
    printed = screen.file.getvalue()
    assert describe(TRAIN, top5=False) in printed
    assert "step 20" not in printed


def test_the_run_record_has_no_scalars() -> None:
    assert scalars({"kind": "run", "step": 0}) == {}
