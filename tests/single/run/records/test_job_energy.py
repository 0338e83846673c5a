"""A job's energy: each counter of each host once."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.cli import main
from lockstep.energy.counters import EnergyCounter, Found
from lockstep.files.jsonl import read_records
from lockstep.report.sources import read_run
from lockstep.run import session
from lockstep.run.records.job_energy import JobEnergy
from lockstep.world.world import World


class _Job:
    """Workers in threads, whose gather is a list, and whose counters grow with each reading."""

    def __init__(self, hosts: list[str], gpus: list[str]) -> None:
        self.hosts, self.gpus = hosts, gpus
        self.barrier, self.values = threading.Barrier(len(hosts)), [""] * len(hosts)
        self.local = threading.local()

    def gather(self, value: Any) -> list[Any]:
        self.values[self.local.rank] = json.dumps(value)
        self.barrier.wait(60)
        found = [json.loads(each) for each in self.values]
        self.barrier.wait(60)
        return found

    def find(self, gpus: list[str]) -> Found:
        readings = {"package-0": iter([10.0, 13.0, 13.0]), "GPU": iter([500.0, 600.0, 600.0])}
        gpu = EnergyCounter("gpu", f"GPU {self.gpus[self.local.rank]}", readings["GPU"].__next__)
        return [EnergyCounter("cpu", "package-0", readings["package-0"].__next__), gpu], ["DRAM: a reason"]

    def take(self, rank: int) -> list[Any]:
        self.local.rank = rank
        world = SimpleNamespace(rank=rank, device=torch.device("cpu"), gather=self.gather)
        energy = JobEnergy(cast(World, world), self.find, self.hosts[rank])
        return [energy.take(), energy.take()]


@pytest.mark.parametrize(
    ("hosts", "gpus", "joules"),
    [
        (["a"], ["0"], {"cpu": 3.0, "gpu": 100.0}),
        (["a", "a"], ["0", "0"], {"cpu": 3.0, "gpu": 100.0}),  # on one GPU
        (["a", "a"], ["0", "1"], {"cpu": 3.0, "gpu": 200.0}),
        (["a", "b", "b"], ["0", "0", "1"], {"cpu": 6.0, "gpu": 300.0}),
    ],
)
def test_each_counter_of_each_host_counts_once(hosts: list[str], gpus: list[str], joules: dict[str, float]) -> None:
    first, second = _in_threads(_Job(hosts, gpus).take, len(hosts))[0]
    assert first == (joules, ["DRAM: a reason"])
    assert second == ({"cpu": 0.0, "gpu": 0.0}, [])


def test_a_resumed_run_has_the_sum_of_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter grows by 10 J with each reading, so that a session has used 10 J for each but its first."""
    monkeypatch.chdir(tmp_path)
    readings = [itertools.count(0.0, 10.0), itertools.count(5000.0, 10.0)]
    found = (([EnergyCounter("cpu", "package-0", each.__next__)], ["DRAM: a reason"]) for each in readings)
    monkeypatch.setattr(session, "JobEnergy", partial(JobEnergy, find=lambda gpus: next(found)))
    words = ["train", "digits", "--run-dir", "run", "--checkpoint-steps", "2", "--log-every", "1", "--epochs", "1"]
    assert main([*words, "--max-steps", "3"]) == 0
    first = list(read_records(Path("run/metrics.jsonl")))
    assert main([*words, "--resume", "run/checkpoints/step-00000002", "--max-steps", "4"]) == 0
    assert sum(next(each) for each in readings) - 5000.0 == 10.0 * (2 + len(_energy("run")))
    assert [record for record in first if record["kind"] == "energy"] == _energy("run")[: _count(first)]
    run = read_run(Path("run/metrics.jsonl"), lambda line: None)
    assert (run.joules, run.not_counted) == (10.0 * len(_energy("run")), ["DRAM: a reason"])
    samples = sum(record["samples"] for record in _energy("run"))
    assert run.joules_per_sample == pytest.approx(10.0 * 5 / samples)  # three steps, and two after the resume


def _count(records: list[dict[str, Any]]) -> int:
    return sum(record["kind"] == "energy" for record in records)


def _energy(run: str) -> list[dict[str, Any]]:
    return [record for record in read_records(Path(run) / "metrics.jsonl") if record["kind"] == "energy"]


def _in_threads(work: Callable[[int], Any], workers: int) -> list[Any]:
    results: list[Any] = [None] * workers

    def run(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
