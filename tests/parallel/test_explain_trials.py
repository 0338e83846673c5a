"""`lockstep explain --try` starts the program of a run again, and measures changes beside it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import LOCKSTEP, run

from lockstep.cli.parse import parse_train
from lockstep.config.mapping import to_mapping
from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.files.jsonl import RecordWriter, read_records

OWN = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
torch.multiprocessing.set_start_method("fork")  # with Python 3.14, too
dist.init_process_group("gloo")
open(f"batch-{sys.argv[1]}", "w").close()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 600), nn.Linear(600, 600)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(torch.ones(100_000, 64), int(sys.argv[1])):
    model(batch).sum().backward()
    optimizer.step()
open("finished", "w").close()
"""
TRAINING = ["digits", "-np", "2", "--device", "cpu", "--run-dir", "runs/a", "-b", "16"]
FACTS = ProgramFacts(40_000_000, 4, 4, "ddp", 1, 2, 2, 0, 0.0, "cpu")


def _record(folder: Path, longest: str, start: dict[str, Any], last: dict[str, Any]) -> None:
    """Write the records of a run of two workers; `longest`: the phase that takes most of each step."""
    folder.mkdir(parents=True)
    writer = RecordWriter(folder / "metrics.jsonl")
    writer.write({"kind": "run", "step": 0, "time_seconds": 0.0, "workers": 2, "hosts": 1, **start})
    phases = {"forward": [0.04] * 2, "backward": [0.1] * 2, "reduction": [0.4] * 2, longest: [0.5] * 2}
    rates = {"images_per_second": 32.0, "steps_per_second": 2.0}
    for number in range(1, 11):
        at = {"step": 10 * number, "time_seconds": 10.0 * number, "phase_seconds": phases}
        writer.write({"kind": "step", **at, **rates})
    writer.write({"step": 100, "time_seconds": 100.0, "phase_seconds": phases, **last})
    writer.close()


def _tried(folder: Path, *words: str) -> tuple[dict[str, dict[str, Any]], str]:
    done = run([*LOCKSTEP, "explain", "--try", "--json", *words], folder)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in json.loads(done.stdout)["tried"]}, done.stderr


def test_a_script_is_changed_from_outside(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    start = {"program": f"{sys.executable} own.py 8", "command": "lockstep run -np 2 -- python own.py 8"}
    _record(tmp_path / "steps", "data_wait", start, {"kind": "program", **asdict(FACTS), "transfer_seconds": 0.4})
    tried, progress = _tried(tmp_path, "steps", "--", sys.executable, "own.py", "{batch}")
    assert set(tried) == {"accumulate", "loader"}
    assert all(not each["reason"] and each["low"] <= each["gain"] <= each["high"] for each in tried.values())
    assert {path.name for path in tmp_path.glob("batch-*")} == {"batch-8", "batch-32"}  # for one exchange
    assert "starts 9 jobs in turn" in progress
    assert not (tmp_path / "finished").exists()


@pytest.mark.long  # nine trainings: a minute and a half beside other tests
def test_training_is_repeated_with_other_flags(tmp_path: Path) -> None:
    """The folder of the run stays as it is."""
    folder = tmp_path / "runs" / "a"
    start = {"arch": "digits-net", "data": "digits", "parameters": 10_000_000}
    _record(folder, "forward", start, {"kind": "epoch", "split": "train", "images_per_second": 32.0})
    about = {"command": ["lockstep", "train", *TRAINING], "folder": str(tmp_path)}
    (folder / "environment.json").write_text(json.dumps(about))
    (folder / "config.yaml").write_text(yaml.safe_dump(to_mapping(parse_train(TRAINING).job)))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    tried, _ = _tried(tmp_path, str(folder))
    assert set(tried) == {"accumulate", "channels_last"}
    assert not any(each["reason"] for each in tried.values())
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert list(read_records(folder / "metrics.jsonl"))[-1]["kind"] == "epoch"
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("data", "lockstep-logs")] == ["runs"]
