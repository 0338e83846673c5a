"""The report's section on the time of each worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from report_material import epoch_record, make_run, run_records, start_record, step_record, straggler_record

from lockstep.report.document import Bars, Chart, Document, Section, Table
from lockstep.report.draw import images, page, text
from lockstep.report.sections import build
from lockstep.report.sources import gather

TITLE = "Time of each worker"


def _document(folder: Path) -> Document:
    return build(gather([folder]), "Results")


def _section(folder: Path) -> Section | None:
    found = [section for section in _document(folder).sections if section.title == TITLE]
    return found[0] if found else None


def _parts(folder: Path) -> dict[str, Bars | Chart | Table]:
    section = _section(folder)
    return {part.key: part for part in section.parts if isinstance(part, Bars | Chart | Table)}


def _epoch(epoch: int, **seconds: list[float]) -> dict[str, Any]:
    return epoch_record(epoch, "train", phase_seconds=seconds)


def _many(folder: Path, workers: int, slow: int) -> Path:
    forward = [1.0] * workers
    forward[slow] = 2.0
    return make_run(folder, [start_record(workers=workers), _epoch(1, forward=forward)])


def test_each_worker_has_a_bar_of_its_time_per_step(tmp_path: Path) -> None:
    epochs = [_epoch(1, forward=[1.0, 3.0], reduction=[2.0, 0.0]), _epoch(2, forward=[3.0, 5.0], metrics=[0.0, 0.0])]
    parts = _parts(make_run(tmp_path, [start_record(), *epochs]))
    bars = parts["worker-phases-1"]
    assert bars.categories == ["0", "1"]
    assert [(name, list(values)) for name, values in bars.stacks] == [
        ("forward", [200.0, 400.0]),
        ("waiting for other workers", [100.0, 0.0]),
    ]


def test_a_programs_bars_end_at_its_whole_step(tmp_path: Path) -> None:
    bars = _parts(make_run(tmp_path, [start_record(), _epoch(1, forward=[1.0, 1.0], before_backward=[0.5, 1.5])]))
    (name, _), (rest, values) = bars["worker-phases-1"].stacks  # type: ignore[union-attr]
    assert (name, rest, [value / values[0] for value in values]) == ("forward", "other work", [1.0, 3.0])


def test_only_the_epochs_of_the_last_number_of_workers_count(tmp_path: Path) -> None:
    resumed = start_record(workers=3, step=15)
    records = [start_record(), _epoch(1, forward=[9.0, 9.0]), resumed, _epoch(2, forward=[1.0, 2.0, 3.0])]
    bars = _parts(make_run(tmp_path, records))["worker-phases-1"]
    assert [list(values) for _, values in bars.stacks] == [[200.0, 400.0, 600.0]]  # of 5 steps


def test_of_many_workers_the_slowest_have_bars(tmp_path: Path) -> None:
    bars = _parts(_many(tmp_path, 1_000, slow=721))["worker-phases-1"]
    assert bars.categories == [*map(str, range(31)), "721"]
    assert [(name, values[-2:]) for name, values in bars.stacks] == [("forward", [100.0, 200.0])]
    assert bars.note == "The slowest 32 of 1,000 workers."


def test_stragglers_are_listed_with_host_numbers(tmp_path: Path) -> None:
    found = [straggler_record(50, ranks=[3, 4, 5]), straggler_record(60, host="b"), straggler_record(70, host="")]
    table = _parts(make_run(tmp_path, [start_record(workers=8), *found, straggler_record(80, phase="x|y")]))[
        "stragglers"
    ]
    assert [list(row) for row in table.rows] == [
        [50, "3-5", 1, "forward", 52.0, 31.0],
        [60, "3", 2, "forward", 52.0, 31.0],
        [70, "3", None, "forward", 52.0, 31.0],
        [80, "3", 1, "x|y", 52.0, 31.0],
    ]
    assert "secret" not in str(table)


def test_the_newest_runs_have_figures(tmp_path: Path) -> None:
    for index, unix_time in enumerate((6.0, 1.0, 5.0, 2.0, 4.0, 3.0)):
        records = [start_record(workers=index + 2, unix_time=unix_time), _epoch(1, forward=[1.0] * (index + 2))]
        make_run(tmp_path / str(index), records)
    parts = _parts(tmp_path)
    titles = [part.title.rpartition(": ")[2] for key, part in parts.items() if key.startswith("worker-phases")]
    assert titles == ["2 workers", "4 workers", "6 workers", "7 workers"]
    section = _section(tmp_path)
    assert "Only the 4 newest runs have figures." in section.text


def test_a_single_worker_and_older_runs_have_no_such_section(tmp_path: Path) -> None:
    make_run(tmp_path / "old", run_records())
    make_run(tmp_path / "single", [start_record(workers=1), _epoch(1, forward=[1.0])])
    make_run(tmp_path / "unknown", [_epoch(1, forward=[1.0, 2.0])])
    assert _section(tmp_path) is None


@pytest.mark.parametrize(
    "damage", [None, "x", [], {}, True, -1, 0, math.nan, math.inf, 10**400, 1e39, [1e39, 0], [[1], 2]]
)
def test_damaged_phases_are_never_fatal_in_any_output(damage: object, tmp_path: Path) -> None:
    spread = {"min": 0.1, "median": 0.2, "max": 0.3, "slowest": 1}
    phases = ("data_wait", "forward", "reduction", "other")
    steps = [step_record(1, phase_spread=damage)]
    steps += [step_record(2, phase_spread={"forward": damage, "backward": {**spread, part: damage}}) for part in spread]
    epochs = [_epoch(1, forward=[1.0, 2.0]), epoch_record(2, "train", phase_seconds=damage)]
    epochs += [epoch_record(3, "train", phase_seconds=dict.fromkeys(phases, each)) for each in (damage, [damage, 1.0])]
    stragglers = [{**straggler_record(5), field: damage} for field in straggler_record(5)]
    other = [start_record(workers=damage, step=damage), *epochs, start_record(), *epochs]
    document = _document(make_run(tmp_path / "run", [start_record(), *steps, *epochs, *stragglers, *other]))
    assert TITLE in text.to_markdown(document)
    assert TITLE in page.render(document)
    (section,) = [section for section in document.sections if section.title == TITLE]
    for part in section.parts:
        assert isinstance(part, Table) or len(images.render(part)) == 3
