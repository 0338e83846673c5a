"""Studies of steps, of collectives and of the number of loader processes."""

from __future__ import annotations

import dataclasses
import re
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from commands import LOCKSTEP, TORCHRUN, Command, Done, run, started
from runs import NETS, small_digits
from worker_group import on_workers, run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.study import collectives
from lockstep.study.collectives import NAMES, OPERATIONS, Arrays, SizeLength, SizePoint, WrongResultError, measure
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
        assert split.keys() == PARTS
        assert all(seconds >= 0 for seconds in split.values())
        assert min(split["forward"], split["backward"], split["optimizer"]) > 0
        assert sum(split.values()) >= 0.99 * step["median"]
        assert step["low"] <= step["median"] <= step["high"]
        assert figures["communication_alone_seconds"] >= 0  # a difference of medians, which noise may bring to 0
        hidden = figures["communication_alone_seconds"] - split["communication_exposed"]
        assert figures["communication_hidden_seconds"] == max(0.0, hidden)
        assert figures["gradient_bytes"] == 4 * (64 * 600 + 600 * 600 + 600 * 10 + 1210)
        assert figures["images_per_second"] > 0
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]


def test_a_single_worker_exchanges_nothing(tmp_path: Path) -> None:
    figures, unchanged, _ = run_in_workers(1, _measure, tmp_path / "run", {})[0]
    assert unchanged
    assert figures["split_seconds"]["communication_exposed"] == 0
    assert figures["communication_alone_seconds"] == 0


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


QUICK = SizeLength(3, 0.001)
WORDS = ["study", "collectives", "--device", "cpu", "--max-size", "1K", "--factor", "16", "--repeats", "3"]
WORDS += ["--seconds", "0.001"]


def _measure_all(world: World, dtype: torch.dtype) -> dict[str, list[SizePoint] | str]:
    return {name: measure(world, name, (4, 16, 1000, 4096), dtype, QUICK) for name in NAMES}


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (3, torch.float16)])
def test_every_operation_is_correct_and_measured_alike(size: int, dtype: torch.dtype) -> None:
    results = run_in_workers(size, _measure_all, dtype)
    assert all(result == results[0] for result in results)
    for name, points in results[0].items():
        assert isinstance(points, list), f"{name}: {points}"
        assert all(0 < point.seconds.low <= point.seconds.median <= point.seconds.high for point in points)
    (barrier,) = results[0].pop("barrier")
    assert (barrier.size_bytes, barrier.bus_bandwidth) == (0, None)
    for name, points in results[0].items():
        sizes = [point.size_bytes for point in points]
        assert sizes == sorted(set(sizes))
        if OPERATIONS[name].splits:
            assert all(bytes_ % (size * dtype.itemsize) == 0 for bytes_ in sizes)
            assert all(
                0 <= asked - got < size * dtype.itemsize for asked, got in zip((1000, 4096), sizes[-2:], strict=True)
            )
        for point in points:
            assert point.algorithm_bandwidth == pytest.approx(point.size_bytes / point.seconds.median)


def _lie(world: World) -> str:
    honest = OPERATIONS["all_reduce"]

    def call(arrays: Arrays) -> None:
        honest.call(arrays)
        if world.rank == 1:
            arrays.target[-1] += 1

    collectives.OPERATIONS["all_reduce"] = dataclasses.replace(honest, call=call)
    try:
        measure(world, "all_reduce", (64,), torch.float32, QUICK)
    except WrongResultError as error:
        return str(error)
    return ""


def test_a_wrong_result_on_one_worker_is_an_error_on_all() -> None:
    errors = run_in_workers(3, _lie)
    assert errors[0] == errors[1] == errors[2]
    assert "all_reduce of 64 bytes returned a wrong result on rank 1 of 3 workers" in errors[0]


@on_workers(2)
def test_refused_operation_is_reported_and_the_rest_continues(world: World) -> None:
    def call(arrays: Arrays) -> None:
        raise RuntimeError("ProcessGroup does not support it\nand more")

    refused = dataclasses.replace(OPERATIONS["all_to_all"], call=call)
    collectives.OPERATIONS["all_to_all"] = refused
    outcome = measure(world, "all_to_all", (64,), torch.float32, QUICK)
    dist.barrier()  # the group still works
    assert outcome == "ProcessGroup does not support it"


def _run(folder: Path, *words: str, command: Command = LOCKSTEP) -> Done:
    return run([*command, *words], folder)


def test_command_records_each_operation_once_across_restarts(tmp_path: Path) -> None:
    first = _run(tmp_path, *WORDS, "-np", "2", "--operations", "all_reduce", "barrier")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("bus MB/s") == 2
    assert re.search(r"1,024 B +│|64 B +│", first.stdout)
    out = tmp_path / "study" / "collectives.jsonl"
    records = list(read_records(out))
    assert [record["operation"] for record in records] == ["all_reduce", "barrier"]
    for record in records:
        assert (record["kind"], record["workers"], record["nodes"]) == ("collectives", 2, 1)
        assert (record["backend"], record["device"], record["dtype"]) == ("gloo", "cpu", "float32")
        assert str(tmp_path) not in str(record)
    assert [point["size_bytes"] for point in records[0]["points"]] == [4, 64, 1024]
    assert all(
        point["bus_bandwidth"] == point["algorithm_bandwidth"] for point in records[0]["points"]
    )  # 2 (n - 1) / n
    with out.open("a") as file:
        file.write('{"kind": "collectives", "operat')  # a crash
        file.write("\n")
    second = _run(tmp_path, *WORDS, "-np", "2", "--operations", "all_reduce", "reduce", "barrier")
    assert second.returncode == 0, second.stderr
    assert "already in study/collectives.jsonl: all_reduce, barrier; add --again to repeat them" in second.stdout
    assert [record["operation"] for record in read_records(out)] == ["all_reduce", "barrier", "reduce"]
    third = _run(tmp_path, *WORDS, "-np", "2", "--operations", "barrier", "--again")
    assert third.returncode == 0, third.stderr
    assert [record["operation"] for record in read_records(out)][3:] == ["barrier"]


def test_the_command_works_under_torchrun(tmp_path: Path) -> None:
    torchrun = [*TORCHRUN, "-m", "lockstep"]
    done = _run(tmp_path, *WORDS, "--operations", "broadcast", command=torchrun)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "study" / "collectives.jsonl")
    assert (record["operation"], record["workers"]) == ("broadcast", 2)


def test_unwritable_file_is_reported_before_measuring(tmp_path: Path) -> None:
    done = _run(tmp_path, *WORDS, "-np", "2", "--out", "/dev/null/x")
    assert done.returncode == 2
    assert "--out /dev/null/x cannot be written" in done.stderr
    assert "MB/s" not in done.stdout
