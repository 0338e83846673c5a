"""In a training step, the host waits for the device only where docs/explanation/performance.md says so.

A wait for an event of an earlier step does not count if both passes of the current one are enqueued behind the event:
the device has work then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import simgpu
import torch
from runs import lively_net, small_digits
from simulated_gpu import gpu_world, run_on_gpu, run_on_gpus

from lockstep.train.callbacks import Callback, TrainingState
from lockstep.train.custom import CustomParts
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")

WORK_OF_PASSES = 20  # operations of the net's forward and backward passes, at least

# Flags, their settings, and how often the host waits in each step.
ALONE: dict[str, tuple[dict[str, Any], int]] = {
    "`--precision fp32`": ({}, 0),
    "`--precision bf16`": ({"precision": "bf16"}, 0),
    "`--precision O1`": ({"precision": "O1"}, 0),
    "`--precision O2`": ({"precision": "O2"}, 0),
    "`--precision O3`": ({"precision": "O3"}, 0),
    "`--precision O3 --loss-scale dynamic`": ({"precision": "O3", "loss_scale": "dynamic"}, 0),
    "`--precision O1 --optimizer adamw`": ({"precision": "O1", "optimizer": "adamw"}, 0),
    "`--precision O1 --optimizer lars`": ({"precision": "O1", "optimizer": "lars"}, 0),
    "`--precision O1 --optimizer lamb`": ({"precision": "O1", "optimizer": "lamb"}, 0),
    "`--precision O2 --ema-decay 0.99 --clip-norm 1`": ({"precision": "O2", "ema_decay": 0.99, "clip_norm": 1.0}, 0),
    "`--optimizer adam`": ({"optimizer": "adam"}, 0),
    "`--optimizer adamw`": ({"optimizer": "adamw"}, 0),
    "`--optimizer lars`": ({"optimizer": "lars"}, 0),
    "`--optimizer lamb`": ({"optimizer": "lamb"}, 0),
    "`--ema-decay 0.99`": ({"ema_decay": 0.99}, 0),
    "`--clip-norm 1`": ({"clip_norm": 1.0}, 0),
    "`--accumulate 2`": ({"accumulate": 2}, 0),
    "`--label-smoothing 0.1`": ({"label_smoothing": 0.1}, 0),
    "`--on-nan stop`": ({"on_nan": "stop"}, 0),
    "`--on-nan skip`": ({"on_nan": "skip"}, 1),
}
TOGETHER: dict[str, tuple[dict[str, Any], int]] = {
    "`--strategy ddp`": ({"strategy": "ddp"}, 0),
    "`--strategy horovod`": ({"strategy": "horovod"}, 0),
    "`--sync-bn` with `--strategy horovod`": ({"strategy": "horovod", "sync_bn": True}, 0),
}
WITH_COUNTS = {row: ALONE[row] for row in ("`--precision O1 --optimizer lamb`", "`--ema-decay 0.99`")}

Waits = dict[str, list[dict[str, int]]]  # of each row and step, by kind


class CountWaits(Callback):
    """Counts the host's waits in each step, from the end of the step before."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, int]] = []

    def on_step_begin(self, run: TrainingState) -> None:
        if run.step == 0:
            simgpu.reset_counts()

    def on_step_end(self, run: TrainingState) -> None:
        waits = {kind: count for kind, count in simgpu.counts().items() if kind.startswith("host wait")}
        waits["host wait: event"] = sum(work_behind < WORK_OF_PASSES for work_behind in simgpu.event_waits())
        self.of_steps.append({kind: count for kind, count in waits.items() if count})
        simgpu.reset_counts()


def _count_waits(world: World, folder: Path, rows: dict[str, tuple[dict[str, Any], int]]) -> Waits:
    found = {}
    for number, (row, (settings, _)) in enumerate(rows.items()):
        count = CountWaits()
        common = {"epochs": 1, "batch_size": 32, "lr": 0.01, "log_every": 100, "track": ()}
        config = configure(**{**common, **settings, "run_dir": folder / str(number)})
        run_with(config, world, small_digits(160, 32), lively_net(), CustomParts(callbacks=[count]))
        found[row] = count.of_steps
    return found


def _count_alone(folder: Path, rows: dict[str, tuple[dict[str, Any], int]], default_device: str) -> Waits:
    torch.set_default_device(default_device)
    return _count_waits(World(RankInfo(), torch.device("simgpu", 0)), folder, rows)


def _count_together(_: World, folder: Path) -> Waits:
    with gpu_world() as world:
        return _count_waits(world, folder, TOGETHER)


def _check(found: Waits, rows: dict[str, tuple[dict[str, Any], int]]) -> None:
    assert found.keys() == rows.keys()
    assert min(len(steps) for steps in found.values()) > 1
    wrong = {row: steps for row, steps in found.items() if any(sum(step.values()) != rows[row][1] for step in steps)}
    assert not wrong, "\n".join(f"{row}: {steps}" for row, steps in wrong.items())


def test_host_waits_match_the_table(tmp_path: Path) -> None:
    _check(run_on_gpu(_count_alone, tmp_path, ALONE, "cpu"), ALONE)


def test_default_device_of_a_script_adds_no_waits(tmp_path: Path) -> None:
    _check(run_on_gpu(_count_alone, tmp_path, WITH_COUNTS, "simgpu"), WITH_COUNTS)


def test_host_waits_as_often_with_two_workers(tmp_path: Path) -> None:
    for found in run_on_gpus(2, _count_together, tmp_path):
        del found["`--strategy ddp`"][0]  # in the first step, DDP shares the layout of its buckets
        _check(found, TOGETHER)
