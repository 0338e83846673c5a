"""Append the suite's results to benchmarks/records, or to `records` in the folder of --out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import torch

from gpu.device import DEVICE, ON_CUDA

VARIABLE = "LOCKSTEP_GPU_SUITE_OUT"


def record(name: str, **figures: Any) -> None:
    """Append a record to gpu_NAME.jsonl, or trial_of_gpu_NAME.jsonl on another device; NAME ends at a colon."""
    harness.FOLDER = _folder()
    harness.append_record({"name": _file_of(name), **figures, "device": _describe()})


def _folder() -> Path:
    folder = Path(os.environ.get(VARIABLE) or harness.FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _file_of(name: str) -> str:
    return ("gpu_" if ON_CUDA else "trial_of_gpu_") + name


def _describe() -> Mapping[str, Any]:
    if not ON_CUDA:
        return {"kind": DEVICE.type}
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "kind": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def compare(
    name: str, contestants: Mapping[str, harness.Work], bars: Mapping[str, harness.Bar], unit: harness.Unit, rounds: int
) -> None:
    """Call `harness.compare`, with the suite's folder and file names for the record."""
    harness.FOLDER = _folder()
    harness.compare(_file_of(name), contestants, bars, unit, rounds)
