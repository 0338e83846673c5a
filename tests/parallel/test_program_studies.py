"""`lockstep study scaling` of scripts that know nothing of Lockstep."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from commands import LOCKSTEP, Done, run
from ports import free_port

from lockstep.files.jsonl import read_records

START = """
import sys, time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(60, 4), torch.zeros(60, dtype=torch.int64))
torch.manual_seed(0)
model = nn.Linear(4, 2)
"""
LOOP = """
for epoch in range(epochs):
    for x, y in DataLoader(data, batch):
        optimizer.zero_grad()
        time.sleep(0.01)
        nn.functional.cross_entropy(replica(x), y).backward()
        optimizer.step()
    print("an evaluation", end="")
    time.sleep(0.2)
open("finished", "w").close()
"""
DDP = f"""{START}
batch, epochs = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
replica = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{LOOP}
dist.destroy_process_group()
"""
ALONE = f"""{START}
batch, epochs, replica, optimizer = 4, 9, model, torch.optim.SGD(model.parameters(), lr=0.1)
{LOOP}
"""
NO_LOADER = f"""{START}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.zeros(3, 4)).mean().backward()
    optimizer.step()
"""
SPAWN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} is done\\n".encode())  # in one piece
    dist.destroy_process_group()
if __name__ == "__main__":
    size = int(sys.argv[1])
    mp.start_processes(main, (size, sys.argv[3]), nprocs=size, start_method=sys.argv[2])
"""


def _study(folder: Path, program: str, flags: str, arguments: str = "") -> Done:
    (folder / "program.py").write_text(program)
    common = ["--steps", "10", "--warmup-steps", "2", "--repeats", "1", "--out", "out.jsonl"]
    command = [*LOCKSTEP, "study", "scaling", *flags.split(), *common, "--", sys.executable, "program.py"]
    return run([*command, *arguments.split()], folder)


def test_steps_of_a_script_are_measured_and_then_it_ends(tmp_path: Path) -> None:
    done = _study(tmp_path, DDP, "-np 1,2", "4 1000")
    assert done.returncode == 0, done.stdout + done.stderr
    records = {record["workers"]: record for record in read_records(tmp_path / "out.jsonl")}
    assert sorted(records) == [1, 2]
    for workers, record in records.items():
        assert record["modes"] == ["weak"]
        assert record["measured_steps"] == 10
        assert record["step_seconds"]["median"] >= 0.01
        assert record["samples_per_second"] / record["steps_per_second"] == pytest.approx(4 * workers)
        assert record["split_seconds"]["other"] + record["split_seconds"]["forward"] >= 0.01
        assert record["utilization"] > 0
        assert (record["memory"], record["peak_memory_bytes"] > 1e7) == ("resident", True)
        assert (record["nodes"], record["device"], "gpu" in record) == (1, "cpu", False)
        facts = record["environment"]
        assert (facts["workers"], facts["threads_per_worker"]) == (workers, record["threads"])
        assert torch.__version__.startswith(facts["packages"]["torch"])
        assert facts["processor"]
        assert socket.gethostname() not in json.dumps(facts)
    assert not (tmp_path / "finished").exists()
    rates = {1: 100.0, 2: 120.0}
    known = [{**record, "samples_per_second": rates[workers]} for workers, record in records.items()]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in known))
    again = _study(tmp_path, DDP, "-np 1,2 --threshold 0.7 --json", "4 1000")
    assert "2 measurements, 2 of them already recorded" in again.stderr
    rows = [line.split() for line in again.stderr.splitlines()]
    assert ["2", "1", "1", "120", "120", "to", "120", "1.20", "60", "%", "*"] in rows
    (series,) = json.loads(again.stdout)["series"]
    assert series["verdict"][0] == "The efficiency falls below 70 % at 2 workers."
    last = {"workers": 2, "nodes": 1, "threads": 1, "samples_per_second": 120.0, "speedup": 1.2, "efficiency": 0.6}
    assert series["rows"][1] | last == series["rows"][1]
    report = run([*LOCKSTEP, "report", "out.jsonl", "-o", "report"], tmp_path)
    assert report.returncode == 0, report.stderr
    assert "samples/s" in (tmp_path / "report/RESULTS.md").read_text()


def test_strong_scaling_divides_the_global_batch(tmp_path: Path) -> None:
    done = _study(tmp_path, DDP, "-np 1,2 --global-batch 12", "{batch} 1000")
    assert done.returncode == 0, done.stdout + done.stderr
    for record in read_records(tmp_path / "out.jsonl"):
        assert (record["modes"], record["global_batch"]) == (["strong"], 12)
        assert record["samples_per_second"] / record["steps_per_second"] == pytest.approx(12)


def test_steps_without_a_loader_are_measured_in_steps(tmp_path: Path) -> None:
    done = _study(tmp_path, NO_LOADER, "-np 1")
    assert done.returncode == 2
    assert "the program's samples are unknown: pass --mode weak" in done.stderr
    assert "lockstep.step(samples=n)" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    done = _study(tmp_path, NO_LOADER, "-np 1 --mode weak")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps/s" in done.stdout
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record["steps_per_second"] > 0


def test_a_script_that_ends_early_is_measured_for_its_steps(tmp_path: Path) -> None:
    done = _study(tmp_path, DDP, "-np 2", "12 1")  # five steps, the first two of which are warm-up
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record["measured_steps"] == 3
    assert "Fewer steps than asked for were measured (3 with 2 workers)" in done.stdout
    assert (tmp_path / "finished").exists()


@pytest.mark.parametrize(
    ("program", "arguments", "reason"),
    [
        pytest.param(ALONE, "", "the workers are independent programs", id="no process group"),
        pytest.param(
            DDP.replace("nn.parallel.DistributedDataParallel(model)", "model"),
            "4 1000",
            "no gradients were exchanged in 10 steps: is the model wrapped?",
            id="not wrapped",
        ),
        pytest.param("raise SystemExit('no such data')", "", "failed with exit code 1", id="failure"),
    ],
)
def test_a_script_that_cannot_be_measured_says_why(program: str, arguments: str, reason: str, tmp_path: Path) -> None:
    done = _study(tmp_path, program, "-np 2", arguments)
    assert done.returncode == 1
    assert reason in done.stdout
    (record,) = read_records(tmp_path / "out.jsonl")
    assert reason in record["failed"]


def test_workers_that_a_script_starts_itself_are_measured(tmp_path: Path) -> None:
    done = _study(tmp_path, SPAWN, "--own-workers -np 1,2 --mode weak", f"{{np}} fork {free_port()}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = {record["workers"]: record for record in read_records(tmp_path / "out.jsonl")}
    for workers in (1, 2):
        assert records[workers]["environment"]["workers"] == workers
        assert (records[workers]["measured_steps"], records[workers]["nodes"]) == (10, 1)
