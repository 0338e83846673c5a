"""One frame of the view."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.report.watch.frame import draw_frame, sparkline
from lockstep.report.watch.run import RunWatch

START = 1_700_000_000.0
NewRun = Callable[[int], Path]
STRAGGLER = {"kind": "straggler", "step": 20, "unix_time": START + 20, "ranks": [1], "host": "b", "phase": "forward"}
STRAGGLER |= {"seconds": 0.052, "others_seconds": 0.031}
COMMANDS = "\x1b[2J\x1b[31mPWN\x1b]0;title\x07\x9b1m\nsecond line"
SIZES = [(width, height) for width in (20, 60, 76, 80, 140, 200) for height in (3, 8, 12, 24, 40, 100)]


def _draw(run: Path, width: int = 100, height: int = 40, now: float = START + 70) -> str:
    lines = draw_frame(RunWatch(run).look(now), width, height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def test_frame_shows_the_run_its_progress_and_its_speed(new_run: NewRun) -> None:
    frame = _draw(new_run(2))
    for words in (
        "net on digits · 2 workers · O2 · global batch 64",
        "● running, last activity 10 s ago",
        "50 %",
        "epoch 2 of 4 · step 20 of 40",
        "now 112 images/s, median 112",
        "data wait 5 %",
        "lr 0.1",
        "loss scale 1,024",
        "train    77.50",
        "val      20.00",
        "10.00 to 20.00",
        "none yet",
        "2 MB/s",
    ):
        assert words in frame


def test_narrow_curves_keep_their_course(new_run: NewRun) -> None:
    assert "loss         train    0.500  █▅▃▁" in _draw(new_run(2), 40)


def test_frame_without_accuracies_has_no_empty_chart(
    new_run: NewRun, records: Callable[[int], list[dict[str, Any]]], write: Callable[..., None]
) -> None:
    run = new_run(2)
    write(
        run / "metrics.jsonl",
        [{name: value for name, value in each.items() if name != "top1"} | {"items": "samples"} for each in records(2)],
    )
    frame = _draw(run)
    assert "loss         train" in frame
    assert "top-1" not in frame
    assert "samples/s" in frame


def test_a_loss_that_has_become_nan_is_named(
    new_run: NewRun, records: Callable[[int], list[dict[str, Any]]], write: Callable[..., None]
) -> None:
    """Records have null for it; the last number is not the latest loss."""
    run = new_run(2)
    write(run / "metrics.jsonl", [{**each, "loss": None} for each in records(3)[-3:]], "a")
    frame = _draw(run)
    assert "train      NaN" in frame
    assert "val        NaN" in frame
    write(run / "metrics.jsonl", records(3)[-3:], "a")
    assert "NaN" not in _draw(run)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_frame_fits_every_terminal_with_the_essentials_first(new_run: NewRun, width: int, height: int) -> None:
    run = new_run(2)
    for now in (START + 70, START + 1e6):
        assert "net on digits" in _draw(run, width, height, now)
    (run / "metrics.jsonl").unlink()
    _draw(run, width, height)


def _add_phases(run: Path, write: Callable[..., None], **straggler: Any) -> None:
    medians = {"data_wait": 0.003, "forward": 0.031, "backward": 0.1234, "optimizer": 0.002, "reduction": 0.02}
    spreads = {phase: {"min": 0.0, "median": value, "max": 1.0, "slowest": 1} for phase, value in medians.items()}
    step = {"kind": "step", "time_seconds": 1.0, "step": 20, "unix_time": START + 20, "phase_spread": spreads}
    write(run / "metrics.jsonl", [step, STRAGGLER | straggler], "a")


def test_a_frame_names_the_straggler_and_splits_a_step(new_run: NewRun, write: Callable[..., None]) -> None:
    run = new_run(2)
    assert "▲" not in _draw(run, 120)
    assert "waiting" not in _draw(run, 120)
    _add_phases(run, write)
    frame = " ".join(_draw(run, 120).split())
    assert "▲ step 20: rank 1 (b) slows all others down: 52 ms per step in the forward pass" in frame
    assert "step data 3 · forward 31 · backward 123 · optimizer 2 · waiting 20 ms" in frame


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_stragglers_and_phases_fit_every_terminal(
    new_run: NewRun, write: Callable[..., None], width: int, height: int
) -> None:
    run = new_run(2)
    _add_phases(run, write, host="a-long-host-name" * 10)
    frame = [line for line in _draw(run, width, height).splitlines() if line]
    assert frame[2].startswith("▲ step 20: rank")
    if width >= 60 and height >= 40:
        assert any("waiting 20 ms" in line for line in frame)
    if height < 16:
        assert not frame[3:] or not frame[3].startswith("  ")


def _program(folder: Path, write: Callable[..., None], workers: int, **step: Any) -> Path:
    """Make a folder with the records of a program; the last one is of START + 60."""
    records: list[dict[str, Any]] = [{"kind": "run", "workers": workers, "program": "python train.py -b 8", "step": 0}]
    phases = {"forward": [0.012 + rank / 1000 for rank in range(workers)], "before_backward": [0.001] * workers}
    for number in range(1, 7):
        record = {
            "kind": "step",
            "time_seconds": 1.0,
            "step": 50 * number,
            "unix_time": START + 10 * number,
            "steps_per_second": 41.25,
        }
        records.append({**record, "phase_seconds": phases, **step})
    folder.mkdir()
    write(folder / "metrics.jsonl", records)
    return folder


def test_a_program_is_shown_with_the_phases_of_each_rank(tmp_path: Path, write: Callable[..., None]) -> None:
    run = _program(tmp_path / "steps", write, 3)
    frame = _draw(run)
    for words in ("python train.py -b 8 · 3 workers", "● running", "step 300", "now 41.2 steps/s, median 41.2"):
        assert words in frame
    rows = [line.split() for line in frame.splitlines()[-4:]]
    assert rows[0] == ["rank", "forward", "other", "ms", "per", "step"]
    assert rows[1:] == [["0", "12", "1"], ["1", "13", "1"], ["2", "14", "1"]]
    assert "top-1" not in frame
    write(run / "metrics.jsonl", [{"kind": "end", "step": 300, "unix_time": START + 61, "exit_code": 3}], "a")
    assert "✖ failed with exit code 3" in _draw(run)


def test_samples_per_second_of_a_program_are_preferred(tmp_path: Path, write: Callable[..., None]) -> None:
    assert "now 330 samples/s" in _draw(_program(tmp_path / "steps", write, 2, images_per_second=330.0))


def test_a_script_with_its_own_loop_is_shown_like_a_training(tmp_path: Path, write: Callable[..., None]) -> None:
    run = _program(tmp_path / "mine", write, 2, images_per_second=330.0, loss=0.5)
    begin = {"kind": "run", "workers": 2, "script": "train.py", "steps_per_epoch": 100, "global_batch": 64, "step": 0}
    steps = (run / "metrics.jsonl").read_text().splitlines()[1:]
    end = {"kind": "stop", "step": 300, "unix_time": START + 61, "reason": "SIGTERM"}
    write(run / "metrics.jsonl", [begin, *map(json.loads, steps), end])
    frame = _draw(run)
    for words in ("train.py · 2 workers · global batch 64", "now 330 samples/s", "train    0.500"):
        assert words in frame
    assert "stopped by SIGTERM; to continue, start the same command" in frame
    assert "no I/O records" not in frame


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_program_of_many_ranks_fits_every_terminal(
    tmp_path: Path, write: Callable[..., None], width: int, height: int
) -> None:
    frame = _draw(_program(tmp_path / "steps", write, 500), width, height)
    assert frame.startswith("python train.py"[: width - 1])
    assert "more ranks" in frame or height < 24 or width < 60


def test_checkpoints_are_shown_by_age(new_run: NewRun) -> None:
    run = new_run(2)
    for step in (10, 20):
        folder = run / "checkpoints" / f"step-{step:08}"
        folder.mkdir()
        (folder / "manifest.json").touch()
        os.utime(folder, (START + step, START + step))
    (run / "checkpoints" / "best").symlink_to("step-00000010")
    assert "last step 20, 50 s ago · best step 10, 1 min 0 s ago" in _draw(run)


@pytest.mark.parametrize(
    ("values", "width", "blocks"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([3, 3, 10, 10], 2, "▁█"),
        ([5], 10, "▁"),
        ([1, 2], 0, "▁"),
        ([-3.0, 1e-9], 5, "▁█"),
        ([1e-300, 1e300, 1e300], 3, "▁██"),
    ],
)
def test_sparklines_reach_from_the_lowest_to_the_highest_value(values: list[float], width: int, blocks: str) -> None:
    assert sparkline(values, width) == blocks


def test_of_many_workers_those_with_troubles_are_shown(new_run: NewRun, write: Callable[..., None]) -> None:
    run = new_run(2)
    text = (run / "metrics.jsonl").read_text().replace('"workers": 2', '"workers": 100')
    (run / "metrics.jsonl").write_text(text)
    for rank in range(100):
        time = START + (1 if rank == 77 else 500)
        io = {"kind": "io", "rank": rank, "unix_time": time, "seconds": 5.0, "read_bytes": 1}
        write(run / "io" / f"worker-{rank}.jsonl", [io])
        (run / "logs" / f"worker-{rank}.log").write_text("")
    (run / "logs" / "worker-88.log").write_text("2026-01-01 00:00:01,001 worker 88 ERROR x\nValueError: no\n")
    frame = _draw(run, 100, 30, START + 505)
    rows = {line.split()[0]: line for line in frame.splitlines() if line.split() and line.split()[0].isdecimal()}
    assert "8 min 24 s ago" in rows["77"]
    assert "ValueError: no" in rows["88"]
    assert f"and {100 - len(rows)} more workers" in frame


@pytest.mark.parametrize("height", [3, 8, 40])
def test_no_foreign_text_commands_the_terminal_or_breaks_a_line(
    new_run: NewRun, write: Callable[..., None], height: int
) -> None:
    run = new_run(2)
    run = run.rename(run.with_name(f"run {COMMANDS}"))
    (run / "config.yaml").write_text(yaml.safe_dump({"numerics": {"precision": COMMANDS}}))
    metrics = run / "metrics.jsonl"
    hostile = STRAGGLER | {"host": COMMANDS, "phase": COMMANDS}
    for ending in ([], [{"kind": "stop", "step": 20, "reason": COMMANDS}], [{"kind": "run", "workers": 2}], [hostile]):
        write(metrics, [{"kind": "run", "arch": COMMANDS, "data": COMMANDS, "workers": 2}, *ending])
        (run / "logs" / "worker-0.log").write_text(f"2026-01-01 00:00:01,001 worker 0 ERROR x\nOSError: {COMMANDS}\n")
        lines = draw_frame(RunWatch(run).look(START + 70), 200, height)
        assert len(lines) <= height
        for line in lines:
            assert line.plain.isprintable()
        assert "PWN" in lines[0].plain
        assert "\ufffd" in lines[1].plain


def test_nonsense_in_any_field_of_any_record_breaks_no_frame(
    new_run: NewRun, records: Callable[[int], list[dict[str, Any]]], write: Callable[..., None], nonsense: object
) -> None:
    run = new_run(2)
    good = [*records(2), STRAGGLER]
    spread = {"min": nonsense, "median": nonsense, "max": nonsense}
    good += [good[1] | {"phase_spread": phases} for phases in (nonsense, {"forward": nonsense}, {"forward": spread})]
    by_kind = {record["kind"]: record for record in good}
    desired = {"kind": "desired", "step": 20, "desired_acc": nonsense}
    ends = [[{**record, name: nonsense}] for record in by_kind.values() for name in record]
    ends += [[dict.fromkeys(record, nonsense) | {"kind": record["kind"]} for record in good], [desired]]
    io = {"kind": "io", "unix_time": nonsense, "seconds": nonsense, "read_bytes": nonsense}
    write(run / "io" / "worker-0.jsonl", [io, io | {"unix_time": START, "seconds": 1e-300}])
    (run / "config.yaml").write_text(yaml.safe_dump({"epochs": nonsense, "run": {"io_every": nonsense}}))
    for end in ends:
        write(run / "metrics.jsonl", [*good, *end, good[1] | {"loss": nonsense}])
        assert len(_draw(run, 100, 40).splitlines()) > 10
