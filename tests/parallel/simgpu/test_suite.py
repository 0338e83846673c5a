"""The parts of benchmarks/gpu on simulated GPUs, so that work on a GPU loses no time to faults of the parts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commands import own_environment, run
from simulated_gpu import run_on_gpu, run_on_gpus

from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TIMED = ("check_a_slow_worker_is_named_with_its_phase", "check_phases_of_the_device_add_up")  # wrong on busy machines
SKIPPED = {
    "alone": {
        "capturing_a_graph_is_refused": "needs CUDA",
        "captured_passes_have_the_bits_of_plain_ones": "needs CUDA",
        "the_host_does_not_wait_in_a_step": "needs CUDA",
        "images_decoded_on_the_device_are_the_cpus": "needs CUDA",
        "dataparallel_on_what_is_there_is_one_worker": "torch has no DataParallel for this device",
    },
    "own": {
        "a_captured_step_trains_like_a_plain_one": "needs CUDA",
        "the_host_does_not_wait_in_run_step": "needs CUDA",
    },
    "shared": {"ddp_through_gloo_is_the_same": "Gloo supports tensors of CUDA alone"},
    "trainer": {"torchs_sync_bn_is_batch_norm_of_all_samples": "torch has no SyncBatchNorm for this device"},
}


def _check(_: World, module: str, results: Path) -> int:
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.path.insert(0, str(BENCHMARKS))
    os.environ |= {"LOCKSTEP_GPU_SUITE_DEVICE": "simgpu", "LOCKSTEP_GPU_SUITE_RESULTS": str(results)}
    checks: Any = import_module(f"gpu.checks.{module}")
    for name in TIMED:
        vars(checks).pop(name, None)
    return int(checks.main())


@pytest.mark.long
@pytest.mark.parametrize("module", SKIPPED)
def test_checks_of_a_gpu_pass(tmp_path: Path, module: str) -> None:
    results, workers = tmp_path / "results.jsonl", 1 if module in ("alone", "own") else 2
    assert run_on_gpus(workers, _check, module, results) == [0] * workers
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["check"]: row["why"] for row in rows if row["status"] != "passed"} == SKIPPED[module]


def _measure(out: Path) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    os.environ |= {"LOCKSTEP_GPU_SUITE_DEVICE": "simgpu", "LOCKSTEP_GPU_SUITE_OUT": str(out)}
    from gpu import limits, peers, recording, zoo

    recording.record("limits", **limits.measure(seconds=0.01)._asdict())
    recording.record("zoo: cifar-small", **zoo.rate("cifar-small", compiled=False))
    peers.STEPS = 1
    peers.compare_hvd_and_ddp()


def test_measurements_of_a_gpu_run(tmp_path: Path) -> None:
    run_on_gpu(_measure, tmp_path)
    assert _recorded(tmp_path) == {"limits", "peers", "zoo"}


def _recorded(out: Path) -> set[str]:
    """Return the names of the records, none of which may be taken for a GPU's."""
    names = [path.stem for path in (out / "records").iterdir()]
    assert all(name.startswith("trial_of_gpu_") for name in names), names
    return {name.removeprefix("trial_of_gpu_") for name in names}


RECORDS = {
    "check": {"check"},
    "speed": {"limits", "resnet50", "resnet50_limits", "zoo"},
    "peers": {"peers"},
    "mnist": {"epochs"},
    "cifar10": {"accuracy", "cifar10_fast", "epochs"},
    "jpeg": {"jpeg"},
}


@pytest.mark.long
@pytest.mark.cold  # torch loads the device where it is imported
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", RECORDS)
def test_whole_parts_run_on_simulated_gpus(
    part: str, tmp_path: Path, shared_data: Path, new_folder: Callable[..., Path]
) -> None:
    data = {"mnist": [shared_data], "cifar10": [shared_data], "jpeg": [new_folder(train=60)]}.get(part, [])
    command = [sys.executable, BENCHMARKS / "gpu", part, *data, "--device", "simgpu", "--out", tmp_path]
    done = run(command, tmp_path, own_environment(OMP_NUM_THREADS="1"), timeout=560, cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout, done.stdout
    assert _recorded(tmp_path) == RECORDS[part], done.stdout
