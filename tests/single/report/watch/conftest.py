"""A run folder as training leaves it, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

START = 1_700_000_000.0
CONFIG = "numerics: {precision: O2}\nrun: {io_every: 5.0}\nepochs: 4\n"
Record = dict[str, Any]
NONSENSE = (None, "x", [], {}, True, -1, -1e300, 5e-324, math.nan, math.inf, -math.inf, 10**400, 1e100, 1e308)


def _records(epochs: int) -> list[Record]:
    """A session of 2 workers, 10 steps an epoch of which each takes a second; its loss halves each epoch."""
    records: list[Record] = [
        {"kind": "run", "step": 0, "time_seconds": 0.0, "unix_time": START, "workers": 2, "global_batch": 64}
        | {"steps_per_epoch": 10, "arch": "net", "data": "digits", "parameters": 113_386}
    ]
    for step in range(5, 10 * epochs + 1, 5):
        common = {"step": step, "time_seconds": float(step), "unix_time": START + step}
        figures = {
            "loss": 2.0 / 2 ** (step / 10),
            "top1": 1 - 0.9 / 2 ** (step / 10),
            "images_per_second": 100.0 + step,
        }
        records.append(common | figures | {"kind": "step", "lr": 0.1, "data_wait": 0.05, "loss_scale": 1024.0})
        if step % 10 == 0:
            ends = common | figures | {"kind": "epoch", "epoch": step // 10, "epochs": 4}
            records += [ends | {"split": "train"}, ends | {"split": "val", "top1": step / 100}]
    return records


@pytest.fixture
def records() -> Callable[[int], list[Record]]:
    """The records of a run that has trained so many epochs of its 4."""
    return _records


@pytest.fixture(params=NONSENSE, ids=lambda value: f"{value!r:.8}")
def nonsense(request: pytest.FixtureRequest) -> object:
    """What a damaged record may hold in place of a figure."""
    return request.param


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[[int], Path]:
    """Makes a run folder that has trained so many epochs of its 4; its workers' last I/O record is of START + 60."""

    def make(epochs: int) -> Path:
        run = tmp_path / "a-run"
        for name in ("io", "logs", "checkpoints"):
            (run / name).mkdir(parents=True)
        (run / "config.yaml").write_text(CONFIG)
        write(run / "metrics.jsonl", _records(epochs))
        for rank in (0, 1):
            (run / "logs" / f"worker-{rank}.log").write_text(f"2026-01-01 00:00:00,001 worker {rank} INFO hello\n")
            io = {"kind": "io", "rank": rank, "unix_time": START + 60, "seconds": 5.0, "read_bytes": 10_000_000}
            write(run / "io" / f"worker-{rank}.jsonl", [io])
        return run

    return make


def write(path: Path, records: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture(name="write")
def write_fixture() -> Callable[..., None]:
    return write
