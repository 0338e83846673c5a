"""Build minimal records for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "command": ["lockstep", "train", "secret"],
    "folder": "/home/secret",
    "host": "secret-host",
    "platform": "Linux-6.1",
    "python": "3.11.7",
    "packages": {"lockstep-torch": "0.1.0", "torch": "2.11.0", "torchvision": "0.26.0", "numpy": "2.0.0"},
    "cores": 8,
    "memory_bytes": 64_000_000_000,
    "gpus": ["A100", "A100"],
    "threads_per_worker": 4,
}
STEPS_AN_EPOCH = 10
SPREAD = {"low": 90.0, "median": 100.0, "high": 120.0}


def write_lines(path: Path, records: Sequence[Mapping[str, Any]], rest: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + rest)
    return path


def start_record(**changes: Any) -> dict[str, Any]:
    record = {"kind": "run", "step": 0, "time_seconds": 0.0, "unix_time": 1000.0, "workers": 2, "global_batch": 64}
    more = {"steps_per_epoch": STEPS_AN_EPOCH, "peak_lr": 0.1, "arch": "resnet18", "data": "cifar10"}
    return {**record, **more, **changes}


def step_record(step: int, **changes: Any) -> dict[str, Any]:
    record = {"kind": "step", "epoch": (step - 1) // STEPS_AN_EPOCH + 1, "step": step, "loss": 2.0 / step}
    figures = {"top1": 0.5, "top5": 0.9, "samples": 640, "images_per_second": 1000.0, "lr": 0.1, "data_wait": 0.02}
    return {**record, **figures, "time_seconds": 0.5 * step, "unix_time": 1000 + 0.5 * step, **changes}


def epoch_record(epoch: int, split: str, **changes: Any) -> dict[str, Any]:
    step = epoch * STEPS_AN_EPOCH
    record = {"kind": "epoch", "split": split, "epoch": epoch, "epochs": 3, "step": step, "loss": 1.0 / epoch}
    figures = {"top1": 0.6 + 0.1 * epoch, "top5": 0.99, "samples": 640, "images_per_second": 1000.0 + epoch}
    return {**record, **figures, "time_seconds": 0.5 * step, "unix_time": 1000.0, "epoch_seconds": 5.0, **changes}


def run_records(epochs: int = 3, **start: Any) -> list[dict[str, Any]]:
    records = [start_record(**start)]
    for epoch in range(1, epochs + 1):
        records += [
            step_record(step) for step in range((epoch - 1) * STEPS_AN_EPOCH + 5, epoch * STEPS_AN_EPOCH + 1, 5)
        ]
        records += [epoch_record(epoch, "train"), epoch_record(epoch, "val")]
    return records


def phase_spread(slowest: float, median: float, fastest: float = 0.0, phase: str = "forward") -> dict[str, Any]:
    """Return the field of a step record for one phase, in seconds."""
    return {"phase_spread": {phase: {"min": fastest, "median": median, "max": slowest, "slowest": 0}}}


def straggler_record(step: int, **changes: Any) -> dict[str, Any]:
    record = {"kind": "straggler", "step": step, "time_seconds": 0.5 * step, "unix_time": 1000.0, "ranks": [3]}
    more = {"host": "secret-host", "phase": "forward", "seconds": 0.052, "others_seconds": 0.031}
    return {**record, **more, **changes}


def make_run(
    folder: Path, records: Sequence[Mapping[str, Any]] | None = None, rest: str = "", config: str | None = None
) -> Path:
    """Write a run folder with records, an environment and a configuration."""
    write_lines(folder / "metrics.jsonl", run_records() if records is None else records, rest)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "config.yaml").write_text("seed: 0\nnumerics:\n  precision: fp32\n" if config is None else config)
    return folder


def scaling_record(workers: int, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    seconds = 0.2 / workers + 0.01
    split = {"data_wait": 0.0, "forward": 0.06 / workers, "backward": 0.12 / workers, "optimizer": 0.02 / workers}
    return {
        "kind": "scaling",
        "modes": ["strong"],
        "workers": workers,
        "nodes": 1,
        "repeat": repeat,
        "job": "01234567",
        "data": "cifar10",
        "arch": "resnet18",
        "precision": "fp32",
        "device": "cpu",
        "cores": 16,
        "samples": 50_000,
        "global_batch": 256,
        "batch": 256 / workers,
        "images_per_second": 256 / seconds + repeat,
        "step_seconds": {"low": seconds, "median": seconds, "high": seconds},
        "epoch_seconds": 50_000 / 256 * seconds,
        "split_seconds": {**split, "communication_exposed": 0.01, "other": 0.0},
        "peak_memory_bytes": 2_000_000_000,
        "environment": {**ENVIRONMENT, "processor": "Model 1", "commit": "abc1234"},
        **changes,
    }


def batch_record(batch: int, **changes: Any) -> dict[str, Any]:
    record = {
        "kind": "batch",
        "batch": batch,
        "workers": 1,
        "fits": True,
        "samples_per_second": SPREAD["median"],
        "job": "76543210",
    }
    more = {"peak_memory_bytes": batch * 1e7, "memory_limit_bytes": 4e9}
    more |= {"data": "cifar10", "arch": "resnet18"}
    return {**record, **more, **changes}


def loading_record(**changes: Any) -> dict[str, Any]:
    stage = {"name": "decode", "about": "from memory", "images_per_second": SPREAD}
    record = {"kind": "loading", "data": "photos", "batch": 32, "device": "cpu", "stages": [stage]}
    pipeline = [{"processes": count, "images_per_second": SPREAD} for count in (0, 1, 2)]
    demand = {"about": "resnet18", "images_per_second": {"low": 40.0, "median": 50.0, "high": 60.0}}
    return {**record, "pipeline": pipeline, "demand": demand, "verdict": ["0 loader processes are enough"], **changes}


def io_record(rank: int, unix_time: float, **changes: Any) -> dict[str, Any]:
    record = {"kind": "io", "rank": rank, "unix_time": unix_time, "seconds": 5.0, "read_bytes": 5e6}
    return {**record, "read_operations": 50, "write_operations": 10, "storage_read_bytes": 0, **changes}
