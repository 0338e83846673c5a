"""Studies of steps and of batch sizes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from commands import LOCKSTEP, Done, run, started
from time_limits import wait_for_ends

from lockstep.files.jsonl import read_records
from lockstep.world.devices import usable_cores

PARTS = {"data_wait", "forward", "backward", "communication_exposed", "optimizer", "other"}


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
    wait_for_ends(children)
    begun = list(read_records(file))
    assert 1 <= len(begun) < 3
    done = _study(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"3 measurements, {len(begun)} of them already recorded" in done.stdout
    records = list(read_records(file))
    assert records[: len(begun)] == begun
    assert sorted((record["workers"], record["global_batch"]) for record in records) == [(1, 16), (2, 16), (2, 32)]
    for record in records:
        assert record["samples_per_step"] == pytest.approx(record["global_batch"], rel=0.2)
        assert record["split_seconds"].keys() == PARTS
        assert min(record["split_seconds"][name] for name in ("data_wait", "forward", "backward", "optimizer")) > 0
    assert all(record["environment"]["packages"]["torch"] for record in records)
    assert "host" not in records[0]["environment"]
    # As many on one worker as on two, which share the cores.
    each = {record["environment"]["threads_per_worker"] for record in records}
    assert each == {max(1, usable_cores() // 2)}
    again = _study(*words, cwd=tmp_path)
    assert "3 measurements, 3 of them already recorded" in again.stdout
    assert list(read_records(file)) == records


NET = """
import torch
class Net(torch.nn.Linear):
    def forward(self, images):
        if len(images) > 40:
            torch.empty(1 << 45)  # more than any limit
        return super().forward(images.flatten(1))
def build(*arguments, **settings):
    return Net(64, 10)
"""
PROGRAM = f"""{NET}
import sys
from torch.utils.data import DataLoader, TensorDataset
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(9):
    for (images,) in DataLoader(TensorDataset(torch.zeros(1000, 64)), int(sys.argv[1])):
        model(images).mean().backward()
        optimizer.step()
"""


def test_largest_batch_that_fits_is_searched_for_only_once(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    words = ["batch", "--first", "16", "--steps", "2", "--", "digits", "--model", "net:build", "--device", "cpu"]
    done = _study(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the largest batch per worker that fits is 40 (42 does not)" in done.stdout
    records = {record["batch"]: record for record in read_records(tmp_path / "study" / "batch.jsonl")}
    assert {size for size, record in records.items() if record["fits"]} == {16, 32, 40}
    assert records[40]["samples_per_step"] == pytest.approx(40)
    assert records[40]["nodes"] == 1 <= records[40]["threads"]  # by which a record is found again
    assert "allocate memory" in records[64]["why"]
    again = _study(words[0], "--json", *words[1:], cwd=tmp_path)
    assert again.returncode == 0
    assert "already recorded: 16, 32, 40, 42, 44, 48, 64" in again.stderr
    found = json.loads(again.stdout)
    assert found["verdict"][0] == "the largest batch per worker that fits is 40 (42 does not)"
    assert [(row["batch"], row["fits"]) for row in found["rows"]] == [(size, size <= 40) for size in sorted(records)]
    assert all(row[name] == records[row["batch"]].get(name) for row in found["rows"] for name in row)
    assert len(list(read_records(tmp_path / "study" / "batch.jsonl"))) == len(records)


def test_a_memory_limit_makes_larger_batches_fail(tmp_path: Path) -> None:
    program = PROGRAM.replace("torch.empty(1 << 45)", "torch.ones(1 << 30)").replace("> 40", "> 63")  # 4 GB
    (tmp_path / "program.py").write_text(program)
    words = ["batch", "--first", "63", "--last", "64", "--steps", "2", "--memory-limit", "3GB"]
    done = _study(*words, "--", sys.executable, "program.py", "{batch}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = {record["batch"]: record for record in read_records(tmp_path / "study" / "batch.jsonl")}
    assert (records[63]["memory_limit_bytes"], records[63]["fits"], records[64]["fits"]) == (3 * 10**9, True, False)
