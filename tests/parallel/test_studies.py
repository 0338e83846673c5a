"""Studies of steps and of batch sizes."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import LOCKSTEP, Done, run, started
from runs import NETS, small_digits
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.study.points import StepLength
from lockstep.study.step_worker import measure_steps
from lockstep.train.fit import configure
from lockstep.train.setup import build_job
from lockstep.world.devices import usable_cores
from lockstep.world.world import World

PARTS = {"data_wait", "forward", "backward", "communication_exposed", "optimizer", "other"}


def _measure(world: World, folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], bool, list[float]]:
    """What is measured, whether the weights are as before, and their sums."""
    config = configure(run_dir=folder, batch_size=16, track=(), log_every=1, **settings)
    data = small_digits(100, 20)
    with closing(build_job(config, world, data, NETS["wide"]())) as job:
        before = [parameter.detach().clone() for parameter in job.network.weights.parameters()]
        figures = measure_steps(job, StepLength(steps=12, warmup_steps=2))
        after = [parameter.detach().clone() for parameter in job.network.weights.parameters()]
    return figures, all(map(torch.equal, before, after)), [float(weights.sum()) for weights in after]


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ddp"},
        {"strategy": "horovod", "accumulate": 2},
        {"strategy": "ddp", "shard_optimizer": True, "compress": "fp16"},
        {"strategy": "ddp", "compress": "powersgd", "optimizer": "adamw"},
    ],
)
def test_the_parts_of_a_step_are_measured_and_nothing_changes(tmp_path: Path, settings: dict[str, Any]) -> None:
    results = run_in_workers(2, _measure, tmp_path / "run", settings)
    for figures, unchanged, _ in results:
        split, step = figures["split_seconds"], figures["step_seconds"]
        assert unchanged
        assert split.keys() == PARTS - ({"communication_exposed"} if settings.get("compress") == "powersgd" else set())
        assert all(seconds >= 0 for seconds in split.values())
        assert min(split["forward"], split["backward"], split["optimizer"]) > 0
        assert sum(split.values()) >= 0.99 * step["median"]
        assert step["low"] <= step["median"] <= step["high"]
        assert figures["gradient_bytes"] == 4 * (64 * 600 + 600 * 600 + 600 * 10 + 1210)
        assert figures["images_per_second"] > 0
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]


def test_a_single_worker_exchanges_nothing(tmp_path: Path) -> None:
    figures, unchanged, _ = run_in_workers(1, _measure, tmp_path / "run", {})[0]
    assert unchanged
    assert figures["split_seconds"]["communication_exposed"] == 0


def _study(*words: str, cwd: Path) -> Done:
    return run([*LOCKSTEP, "study", *words], cwd)


def test_a_scaling_study_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    words = ["scaling", "--np", "1,2", "--repeats", "1", "--steps", "4", "--", "digits", "-b", "16", "--device", "cpu"]
    file = tmp_path / "study" / "scaling.jsonl"
    with started([*LOCKSTEP, "study", *words], tmp_path) as first:
        first.wait_until(lambda: file.exists() and file.read_text().count("\n"))
        # The launcher of the next job may not listen yet; then Python itself is interrupted.
        first.send_signal(signal.SIGINT)
        children = first.descendants()
        assert first.wait(60) == 130
    assert "to measure the rest, run the same command again" in first.text
    assert not psutil.wait_procs(children, timeout=20)[1]
    begun = list(read_records(file))
    assert 1 <= len(begun) < 3
    done = _study(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"3 measurements, {len(begun)} of them already recorded" in done.stdout
    records = list(read_records(file))
    assert records[: len(begun)] == begun
    assert sorted((record["workers"], record["global_batch"]) for record in records) == [(1, 16), (2, 16), (2, 32)]
    assert all(record["split_seconds"].keys() == PARTS for record in records)
    assert all(record["environment"]["packages"]["torch"] for record in records)
    assert "host" not in records[0]["environment"]
    # As many on one worker as on two, which share the cores.
    each = {record["environment"]["threads_per_worker"] for record in records}
    assert each == {max(1, usable_cores() // 2)}
    again = _study(*words, cwd=tmp_path)
    assert "3 measurements, 3 of them already recorded" in again.stdout
    assert list(read_records(file)) == records


def test_disconnected_worker_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    words = ["scaling", "--np", "2", "--repeats", "1", "--steps", "2", "--", "digits", "--model", "net:build"]
    (tmp_path / "net.py").write_text(
        "import os, signal, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, images):\n"
        "        if os.environ['RANK'] == '1' and self.training:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().forward(images.flatten(1))\n"
        "def build(*arguments, **settings):\n"
        "    return Net(64, 10)\n"
    )
    done = _study(*words, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 137
    failed = next(read_records(tmp_path / "study" / "scaling.jsonl"))["failed"]
    assert "worker 1 of 2" in failed
    assert "SIGKILL" in failed


def test_failed_job_is_recorded_and_measured_again(tmp_path: Path) -> None:
    words = ["scaling", "--np", "1", "--repeats", "1", "--steps", "2", "--", "digits", "--model", "net:build"]
    (tmp_path / "net.py").write_text("def build(*arguments, **settings):\n    raise ValueError('no such net')\n")
    done = _study(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "no such net" in done.stdout
    assert "no such net" in next(read_records(tmp_path / "study" / "scaling.jsonl"))["failed"]
    assert "1 measurements, 0 of them already recorded" in _study(*words, cwd=tmp_path).stdout


def test_largest_batch_that_fits_is_searched_for_only_once(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, images):\n"
        "        if len(images) > 40:\n"
        "            torch.empty(1 << 45)  # more than any limit\n"
        "        return super().forward(images.flatten(1))\n"
        "def build(*arguments, **settings):\n"
        "    return Net(64, 10)\n"
    )
    words = ["batch", "--first", "16", "--steps", "2", "--", "digits", "--model", "net:build", "--device", "cpu"]
    done = _study(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the largest batch per worker that fits is 40 (42 does not)" in done.stdout
    records = {record["batch"]: record for record in read_records(tmp_path / "study" / "batch.jsonl")}
    assert {size for size, record in records.items() if record["fits"]} == {16, 32, 40}
    assert "allocate memory" in records[64]["why"]
    again = _study(*words, cwd=tmp_path)
    assert again.returncode == 0
    assert "already recorded: 16, 32, 40, 42, 44, 48, 64" in again.stdout
    assert len(list(read_records(tmp_path / "study" / "batch.jsonl"))) == len(records)
