"""What the three readers of metrics.jsonl make of damaged, truncated, hostile and repeated records."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.files.metric_records import Columns, MetricRecords
from lockstep.report.sources import read_run
from lockstep.report.watch.run import RunWatch
from lockstep.run.records.run_folder import RunFolder
from lockstep.train.history import EpochRecords, read_epochs
from lockstep.world.world import World

START = {"kind": "run", "step": 0, "time_seconds": 0.0, "unix_time": 1e9, "workers": 2, "steps_per_epoch": 10}


def _epoch(epoch: int, loss: object, **more: object) -> dict[str, Any]:
    place = {"kind": "epoch", "split": "val", "epoch": epoch, "step": 10 * epoch, "time_seconds": 1.0 * epoch}
    return {**place, "unix_time": 1e9 + epoch, "loss": loss, **more}


class _Alone:
    """Stands in for the world of a single worker."""

    is_main = True

    def from_main(self, value: object) -> object:
        return value


def _report(folder: Path) -> list[float]:
    run = read_run(folder / "metrics.jsonl", lambda line: None)
    assert run is not None
    return [*run.epochs["loss", "val"].values]


def _watch(folder: Path) -> list[float]:
    return RunWatch(folder).look(1e9).metrics.curve("loss", "val")


def _fit(folder: Path) -> list[float]:
    epochs = EpochRecords()
    epochs.take_all(read_epochs(RunFolder(folder), 1000, cast(World, _Alone())))
    return epochs.history().val["loss"].tolist()


Reader = Callable[[Path], list[float]]
READERS = pytest.mark.parametrize("read", [_report, _watch, _fit])
FINE = [START, _epoch(1, 4.0), _epoch(2, 3.0)]
SESSION = {**START, "step": 10}  # the second epoch is done again


@READERS
@pytest.mark.parametrize(
    ("lines", "losses"),
    [
        pytest.param([], [4.0, 3.0], id="none"),
        pytest.param(['{"kind": "epoch", "split": "val", "step": 30, "time_sec'], [4.0, 3.0], id="truncated"),
        pytest.param(
            ["\0\0\0", "[1]", "null", '{"kind": ["epoch"]}', '{"kind": {}}', "{}", "["], [4.0, 3.0], id="damaged"
        ),
        pytest.param(["[" * 100_000, '{"kind": "epoch", "step": 1e400}'], [4.0, 3.0], id="hostile"),
        pytest.param(['{"kind": "epoch", "loss": 1, "split": "val", "epoch": 3}'], [4.0, 3.0], id="no position"),
        pytest.param([SESSION, _epoch(2, 2.0)], [4.0, 2.0], id="doubled after resume"),
        pytest.param([SESSION, _epoch(2, 2.0), SESSION, _epoch(2, 1.0), _epoch(3, 0.5)], [4.0, 1.0, 0.5], id="twice"),
        pytest.param([_epoch(3, 1.0, epochs="x", top1=[], metrics=7)], [4.0, 3.0, 1.0], id="other fields"),
    ],
)
def test_all_readers_take_the_same_records(
    read: Reader, lines: list[str | dict[str, Any]], losses: list[float], tmp_path: Path
) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in [*FINE, *lines]]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    assert read(tmp_path) == losses


@READERS
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("loss", each) for each in (None, "x", [], {}, True, math.nan, math.inf, -math.inf, 10**400, 1e100, [1.0])),
        *(("step", each) for each in (None, "x", [], True, -1, 0.5, math.nan, 10**400, 1e300)),
    ],
    ids=lambda each: f"{each!r:.8}",
)
def test_invalid_figures_and_steps_are_left_out(read: Reader, field: str, value: object, tmp_path: Path) -> None:
    lines = [*FINE, {**_epoch(3, 9.0), field: value}, _epoch(4, 1.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read(tmp_path)
    assert [loss for loss in found if not math.isnan(loss)] == [4.0, 3.0, 1.0]
    assert field == "loss" or len(found) == 3


def test_steps_of_the_last_session_give_its_rates() -> None:
    records = MetricRecords()
    step = {"kind": "step", "time_seconds": 1.0, "unix_time": 1e9}
    records.take_all([START, {**step, "step": 5, "images_per_second": 1.0, "lr": 0.5}])
    records.take_all([{**START, "step": 5}, {**step, "step": 6, "images_per_second": 3.0}, {"kind": "step"}])
    assert list(records.recent) == [{"images_per_second": 3.0, "unix_time": 1e9}]
    assert records.steps.points("images_per_second") == [(5.0, 1.0), (6.0, 3.0)]
    assert records.steps.points("images_per_second", after=5) == [(6.0, 3.0)]
    assert list(records.steps["epochs"]) == [0.5, 0.6]
    assert (records.steps.has("lr"), records.steps.has("top1")) == (True, False)
    assert (records.taken, records.incomplete, records.workers) == (5, 1, [2, 2])


def test_energy_of_a_resumed_run_is_summed() -> None:
    records, place = MetricRecords(), {"kind": "energy", "time_seconds": 0.0, "unix_time": 1e9}
    for _ in range(2):  # the second session takes the steps again
        records.take(START)
        records.take({**place, "step": 0, "joules": {}, "samples": 0, "unread": ["DRAM: a reason"]})
        records.take({**place, "step": 10, "joules": {"cpu": 100.0, "gpu": 300.0}, "samples": 50})
        records.take({**place, "step": 10, "joules": {"cpu": 25.0}, "samples": 0})
    for damage in (None, [1.0], {"cpu": "9"}, {"cpu": -1e9}, {"cpu": math.nan}):
        records.take({**place, "joules": damage, "samples": -1})
    assert (records.joules, records.not_counted) == (850.0, ["DRAM: a reason"])
    assert records.joules_of_samples / records.samples == 8.0


def _columns(rows: int, limit: int | None) -> Columns:
    columns = Columns(("loss",), limit)
    for x in range(rows):
        columns.add((x, x / 10, 0.0), {} if x % 4 == 3 else {"loss": 3 * x + 1})
    return columns


def test_few_rows_are_kept_as_they_are() -> None:
    assert _columns(7, 8).points("loss") == [(x, 3 * x + 1) for x in (0, 1, 2, 4, 5, 6)]
    assert len(_columns(1000, None)["step"]) == 1000


@pytest.mark.parametrize("count", [8, 9, 100, 1000, 12_345])
def test_many_rows_become_means_in_their_order_up_to_the_last(count: int) -> None:
    columns = _columns(count, 8)
    steps = list(columns["step"])
    assert 4 <= len(steps) <= 8
    assert steps == sorted(steps)
    assert columns["epochs"] == pytest.approx([step / 10 for step in steps])
    assert steps[0] < 0.2 * count
    assert steps[-1] > 0.7 * count
    assert all(loss == pytest.approx(3 * step + 1, rel=0.5) for step, loss in columns.points("loss"))


@pytest.mark.parametrize(("rows", "limit"), [(7, None), (9, 8), (1000, 8)])
def test_rows_of_later_steps_are_cut(rows: int, limit: int | None) -> None:
    columns = _columns(rows, limit)
    columns.cut(5)
    assert all(step <= 5 for step in columns["step"])
    columns.cut(-1)
    assert not list(columns["step"])
    columns.add((6, 0.6, 0.0), {"loss": 1.0})
    assert columns["step"][-1] == 6
