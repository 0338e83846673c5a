"""What the launcher makes of the steps that its workers publish: messages and records."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disks import largest_file

from lockstep.diagnosis.observed_steps import (
    PHASES,
    WAITS,
    LinkUse,
    ObservedSteps,
    ProcessSteps,
    ProgramFacts,
    TrainedState,
)
from lockstep.errors import ConfigError
from lockstep.files.io_records import job_io, worker_file
from lockstep.files.io_totals import IoTotals
from lockstep.files.jsonl import read_records
from lockstep.observe import job_steps
from lockstep.observe.job_steps import KEPT_RECORDS

PROGRAM = ("python", "train.py")
JobSteps = partial(job_steps.JobSteps, record_seconds=0.0)


def _observed(report: int, forward: float, samples: int | None = 400) -> ObservedSteps:
    """Return the steps of a worker that has made so many reports of 50 steps, and whose forward pass takes so long."""
    steps = 50 * report
    per_step = tuple({"forward": forward, "reduction": 0.1 - forward}.get(phase, 0.0) for phase in PHASES)
    total = tuple(steps * seconds for seconds in per_step)
    all_samples = None if samples is None else samples * report
    return ObservedSteps(steps, all_samples, steps, all_samples or 0, steps, 0.1 * steps, report, 50, total, per_step)


def _message(report: int, *forward: float, met: bool = True) -> tuple[tuple[ProcessSteps, ...], bool]:
    pairs = enumerate(forward)
    processes = tuple(ProcessSteps(rank, 100 + rank, met, _observed(report, seconds)) for rank, seconds in pairs)
    return processes, False


def _records(folder: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def test_a_slow_rank_is_named_once_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = JobSteps(PROGRAM, tmp_path / "steps")
    steps.begin(["a", "b"])
    for report in range(1, 9):
        steps.add(*_message(report, 0.01, 0.05))
        assert capsys.readouterr().err.count("rank 1 (b) slows all others down: 50 ms per step") == (report == 3)
    steps.close(0)
    (straggler,) = _records(tmp_path / "steps", "straggler")
    assert (straggler["ranks"], straggler["host"], straggler["phase"], straggler["step"]) == ([1], "b", "forward", 150)
    assert [(each["ranks"], each["phase"]) for each in steps.stragglers] == [((1,), "forward")]
    first, *others = _records(tmp_path / "steps", "step")
    assert first["phase_seconds"] == {"forward": [0.01, 0.05], "reduction": [0.09, 0.05]}
    assert first["phase_spread"]["forward"] == {"min": 0.01, "median": 0.03, "max": 0.05, "slowest": 1}
    assert (first["step"], first["images_per_second"], first["steps_per_second"]) == (50, 160.0, 10.0)
    assert 0 <= first["busy_cores"] <= (os.cpu_count() or 1)
    assert [record["step"] for record in others] == [50 * report for report in range(2, 9)]
    assert _records(tmp_path / "steps", "end")[0]["exit_code"] == 0


def test_a_slow_link_is_named_once_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = JobSteps(PROGRAM, tmp_path)
    steps.begin(["a", "b", "c"])
    links = [LinkUse(rank, (rank + 1) % 3, 1_000_000, 0.01 if rank else 0.9, 7, 300) for rank in range(3)]
    for report in range(1, 9):
        processes, _ = _message(report, 0.01, 0.01, 0.01)
        own = [replace(each.steps, links=(link,)) for each, link in zip(processes, links, strict=True)]
        sent = [replace(each, steps=steps) for each, steps in zip(processes, own, strict=True)]
        steps.add(sent, False)
        assert ("link a -> b is slow" in capsys.readouterr().err) is (report == 3)
    steps.close(0)
    records = _records(tmp_path, "slow_link")
    assert [(each["ends"], each["step"]) for each in records] == [(["a", "b"], 150)]
    assert [each["ends"] for each in steps.kept if each["kind"] == "slow_link"] == [["a", "b"]]
    assert records[0]["rate"] == pytest.approx(0.011, abs=0.001)


def test_the_use_of_gpus_is_recorded_without_that_of_the_start(tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path)
    steps.begin(["a"])
    steps.add_energy({}, (), (0.9,))
    for report, use in enumerate((0.5, 0.1, 0.3), start=1):
        steps.add(*_message(report, 0.01))
        steps.add_energy({}, (), (use, use + 0.1))
    steps.close(0)
    assert [each.get("gpu_use") for each in _records(tmp_path, "step")] == [None, 0.55, 0.15]


def test_io_is_recorded_by_worker_and_devices_once_a_host(tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path)
    for start in (1000.0, 2000.0):
        steps.begin(["a", "a", "b"])
        for seconds in (5.0, 5.0, 10.0):  # the second one is no news
            amounts = dict.fromkeys(("read_bytes", "node_disk_reads"), int(seconds))
            totals = IoTotals().plus(start + seconds, seconds, amounts)
            observed = (ObservedSteps(io=totals), replace(_observed(1, 0.01), io=totals), ObservedSteps(io=totals))
            steps.add(tuple(ProcessSteps(rank, 7, True, each) for rank, each in enumerate(observed)), False)
    steps.close(0)
    for rank in range(3):
        records = list(read_records(worker_file(tmp_path, rank)))
        assert [(each["unix_time"], each["seconds"], each["read_bytes"]) for each in records] == [
            *((1005.0, 5.0, 5), (1010.0, 5.0, 5)),
            *((2005.0, 5.0, 5), (2010.0, 5.0, 5)),
        ]
        assert all(("node_disk_reads" in each) is (rank != 1) for each in records)
        assert all("write_operations" not in each for each in records)
    (_, between, *_) = job_io(tmp_path)
    assert between["read_bytes_per_second"] == 3.0
    assert list(steps.by_rank()) == [1], "workers without steps"


def test_independent_programs_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    steps = JobSteps(PROGRAM)
    steps.begin(["", ""])
    for report in range(1, 9):
        steps.add(*_message(report, 0.01, 0.05, met=False))
    assert capsys.readouterr().err == ""
    assert steps.by_rank()[1].steps == 400


@pytest.mark.parametrize("met", [True, False])
def test_workers_that_train_apart_are_named_with_the_command(
    met: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = JobSteps(PROGRAM, tmp_path / "steps")
    steps.begin(["", ""])
    states = [TrainedState(10, 1, rank, rank, exchanges=0, is_joined=met, is_wrapped=met) for rank in range(2)]
    observed = [replace(_observed(1, 0.01), state=state) for state in states]
    for _ in range(2):
        steps.add(tuple(ProcessSteps(rank, 7, met, each) for rank, each in enumerate(observed)), False)
    said = capsys.readouterr().err
    assert said.count("lockstep: after step 10, the workers' weights differ: ") == 1
    assert said.endswith(". To find the cause: lockstep check -- python train.py\n")
    steps.close(0)
    assert [each["text"] for each in _records(tmp_path / "steps", "finding")] == steps.findings != []


def test_restarts_and_processes_of_a_rank_are_summed(tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path)
    for _ in range(2):
        steps.begin(["", ""])
        steps.add(*_message(1, 0.01, 0.01))
    steps.add((ProcessSteps(0, 555, True, _observed(2, 0.01)),), False)
    assert {rank: each.steps for rank, each in steps.by_rank().items()} == {0: 200, 1: 100}
    steps.close(0)
    assert [record["step"] for record in _records(tmp_path, "run")] == [0, 50]
    assert [record["time_seconds"] for record in _records(tmp_path, "run")] == [0.0, 5.0]  # 0.1 s per step


def test_energy_of_hosts_and_restarts_is_summed(tmp_path: Path) -> None:
    steps, reason = JobSteps(PROGRAM, tmp_path), "CPU: a reason"
    for _ in range(2):
        steps.begin(["a", "b"])
        for host_joules in (10.0, 20.0):  # of the start
            steps.add_energy({"cpu": host_joules}, (reason,))
        for report in (1, 2):
            steps.add_energy({"cpu": 3.0, "gpu": 5.0}, ())
            steps.add(*_message(report, 0.01, 0.01))
        steps.add_energy({"cpu": 7.0}, ())
    steps.close(0)
    first, *energy = _records(tmp_path, "energy")
    assert (first["joules"], first["unread"]) == ({}, [reason])
    of_a_start = [({"cpu": 33.0, "gpu": 5.0}, 0), ({"cpu": 3.0, "gpu": 5.0}, 800), ({"cpu": 7.0}, 0)]
    assert [(record["joules"], record["samples"]) for record in energy] == 2 * of_a_start
    assert (steps.joules, steps.not_counted) == ({"cpu": 86.0, "gpu": 20.0}, [reason])


def test_records_after_a_restart_with_fewer_workers_are_complete(tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path, record_seconds=1e9)  # only at the end of each start
    for workers in (3, 2):
        steps.begin([""] * workers)
        steps.add(*_message(1, *[0.01] * workers))
    steps.close(0)
    assert [len(record["phase_seconds"]["forward"]) for record in _records(tmp_path, "step")] == [3, 2]
    assert [record["step"] for record in _records(tmp_path, "step")] == [50, 100]
    sums = [(record["step"], record["phase_seconds"]["forward"]) for record in _records(tmp_path, "epoch")]
    assert sums == [(50, [0.5] * 3), (100, [0.5, 0.5])]
    assert {rank: each.steps for rank, each in steps.by_rank().items()} == {0: 100, 1: 100, 2: 50}


def test_samples_that_a_rank_does_not_know_are_left_out(tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path)
    steps.begin(["", ""])
    known = (ProcessSteps(rank, rank, True, _observed(1, 0.01, 8 if rank else None)) for rank in range(2))
    steps.add(tuple(known), False)
    steps.close(0)
    (record,) = _records(tmp_path, "step")
    assert "images_per_second" not in record
    assert record["steps_per_second"] == 10.0


def test_a_job_that_is_not_started_leaves_no_records(tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path / "steps")
    steps.add(*_message(1, 0.01, 0.05))  # from a host whose workers are not expected yet
    steps.close(None)
    JobSteps(PROGRAM, tmp_path / "steps")  # the same command can be started again


def test_ranks_that_no_other_waits_for_are_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Trainings of their own may share a process group, for example to gather their results at the end."""
    steps = JobSteps(PROGRAM)
    steps.begin(["", ""])
    for report in range(1, 9):
        both = [replace(_observed(report, seconds), report_seconds=_alone(seconds)) for seconds in (0.01, 0.05)]
        steps.add(tuple(ProcessSteps(rank, 7, True, each) for rank, each in enumerate(both)), False)
    assert capsys.readouterr().err == ""


def _alone(forward: float) -> tuple[float, ...]:
    return tuple(forward if phase == "forward" else 0.0 for phase in PHASES)


def test_the_second_program_of_a_rank_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    steps = JobSteps(PROGRAM)
    steps.begin(["", ""])
    first = tuple(ProcessSteps(rank, 1, True, _observed(40, 0.01)) for rank in range(2))
    for report in range(1, 5):
        pairs = enumerate((0.01, 0.05))
        second = tuple(ProcessSteps(rank, 2, True, _observed(report, seconds)) for rank, seconds in pairs)
        steps.add((*first, *second), False)
    assert "rank 1 slows all others down" in capsys.readouterr().err
    assert steps.by_rank()[0].steps == 50 * (40 + 4)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/steps", tmp_path):
        with pytest.raises(ConfigError, match="folder of records"):
            JobSteps(PROGRAM, folder)


def test_a_full_disk_ends_only_the_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = JobSteps(PROGRAM, tmp_path / "steps")
    steps.begin(["", ""])
    with largest_file(0):
        for report in range(1, 9):
            steps.add(*_message(report, 0.01, 0.05))
    errors = capsys.readouterr().err
    assert errors.count("File too large; the job's steps are not recorded") == 1
    assert "rank 1 slows all others down" in errors
    steps.close(0)


def test_facts_and_the_exchange_alone_are_recorded_at_the_end(tmp_path: Path) -> None:
    """Each worker waits for the other in turn; the exchange takes 2 s."""
    steps = JobSteps(PROGRAM, tmp_path)
    steps.begin(["a", "b"])
    facts = ProgramFacts(400, 4, 2, "ddp")
    waits = [(5.0, 2.0) * (WAITS // 2), (2.0, 5.0) * (WAITS // 2)]
    for report in range(1, 4):
        observed = [replace(_observed(report, 0.01), waits=each, facts=facts) for each in waits]
        steps.add(tuple(ProcessSteps(rank, 7, True, each) for rank, each in enumerate(observed)), False)
    steps.close(0)
    (program,) = _records(tmp_path, "program")
    assert {"transfer_seconds": 2.0, **asdict(facts)}.items() <= program.items()
    assert [record["kind"] for record in steps.kept] == ["run", *["step"] * 3, "program", "epoch", "end"]


def test_only_the_newest_records_are_kept_without_a_folder() -> None:
    steps = JobSteps(PROGRAM)
    for _ in range(2):
        steps.begin(["a", "b"])
        for report in range(1, 2 * KEPT_RECORDS):
            steps.add(*_message(report, 0.01, 0.05))
    assert steps.kept[0]["kind"] == "run"
    assert len(steps.kept) == KEPT_RECORDS + 2
