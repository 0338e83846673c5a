"""The link that slows a job over three hosts is named, in network namespaces; where all are equal, none is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts import Bed
from ssh_job import Job

from lockstep.files.jsonl import read_records

pytestmark = pytest.mark.cold  # on hosts of their own

RATE = "50mbit"
PROGRAM = """
import time

import torch
from torch import distributed, nn

torch.set_num_threads(1)
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(100, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
distributed.destroy_process_group()
"""
TRAIN = "train digits -b 8 --epochs 3 -p 20 --device cpu"


def test_the_trainer_names_it(bed: Bed, tmp_path: Path) -> None:
    bed.limit_link("node2", "node1", RATE)
    hosts, run = ",".join(f"{name}:1" for name in bed.names), tmp_path / "run"
    command = [sys.executable, "-m", "lockstep", *TRAIN.split(), "--run-dir", str(run)]
    with Job(bed, tmp_path / "job", command=command, hosts=hosts) as job:
        assert job.wait() == 0, job.stderr
    records = read_records(run / "metrics.jsonl")
    assert [each["ends"] for each in records if each["kind"] == "slow_link"] == [["node2", "node1"]], job.stderr


@pytest.mark.parametrize(
    ("limited", "ends"),
    [
        ("a link", [["node2", "node1"]]),
        pytest.param("all hosts", [], marks=pytest.mark.long),
        pytest.param("a host", [["node2"]], marks=pytest.mark.long),
        pytest.param("none", [], marks=pytest.mark.long),
    ],
)
def test_the_slow_link_is_named(
    limited: str, ends: list[list[str]], bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_STRAGGLER_SECONDS", "0.5")
    if limited == "a link":
        bed.limit_link("node2", "node1", RATE)  # Gloo's ring sends to the previous rank
    for name in {"a host": ["node2"], "all hosts": bed.names}.get(limited, []):
        bed.limit(name, RATE)
    script, records = tmp_path / "train.py", tmp_path / "steps"
    script.write_text(PROGRAM)
    hosts, options = ",".join(f"{name}:1" for name in bed.names), ["--observe-dir", str(records)]
    with Job(bed, tmp_path / "job", command=[sys.executable, str(script)], hosts=hosts, options=options) as job:
        assert job.wait() == 0
    found = [each["ends"] for each in read_records(records / "metrics.jsonl") if each["kind"] == "slow_link"]
    if limited == "a host":  # one of its links may be slow for three reports before the other is
        assert all("node2" in each for each in found), job.stderr
        found = found[-1:]
    assert found == ends, job.stderr
