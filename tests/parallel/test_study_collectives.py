"""Collectives measured between real workers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import LOCKSTEP, TORCHRUN, Command, Done, run
from worker_group import on_workers, run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.study import collectives
from lockstep.study.collectives import NAMES, OPERATIONS, Arrays, SizeLength, SizePoint, WrongResultError, measure
from lockstep.world.world import World

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
