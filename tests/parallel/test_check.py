"""`lockstep check` names the faults of scripts whose workers do not train one model on different data."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checked_programs
import pytest
from checked_programs import CORRECT, FAULTS
from commands import LOCKSTEP, Done, run
from time_limits import scaled
from worker_group import run_in_workers

from lockstep.script_check.answers import Finding
from lockstep.script_check.hooks import record
from lockstep.script_check.invariance import SAME_LOSSES
from lockstep.script_check.recorder import Limits
from lockstep.script_check.replicas import SAME_WEIGHTS, judge_replicas
from lockstep.script_check.samples import judge_samples
from lockstep.world.world import World

PROGRAMS = Path(checked_programs.__file__)
OTHER_LAUNCHES = ("hvd", "accelerate", "lightning", "own_loop", "no_group")  # of scripts that connect by themselves
FIRST = {fault.kind: name for name, fault in reversed(FAULTS.items())}  # of each kind
HANGS = "longer_on_rank_0"  # at the end, when a worker has left

ODD = """
import torch
from torch.utils.data import DataLoader, SequentialSampler
class Odd(SequentialSampler):
    shuffle = property(lambda self: 1 / 0)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.ones(2, 1)
def step(batch):
    model(batch).mean().backward()
    optimizer.step()
step(data)
for batch in DataLoader(data, sampler=Odd(data)):
    step(batch)
"""
BY_BATCH = """
import sys, torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randint(4, (128,)))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in DataLoader(data, int(sys.argv[1]), sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels, reduction=sys.argv[2]).backward()
        optimizer.step()
"""
ALONE = """
import os, torch
model = torch.nn.Linear(1, 1)
if os.environ["RANK"] == "0":
    model(torch.ones(2, 1)).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
"""

LONE_BARRIER = """
import torch
from torch import distributed
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
if distributed.get_rank() == 0:
    distributed.barrier()
model(torch.ones(2, 1)).mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
FULL = """
import os, torch
torch.manual_seed(int(os.environ["RANK"]))
model = torch.nn.Linear(1, 1)
for _ in range(2):
    model(torch.ones(2, 1)).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
raise OSError("no space left on the device")
"""


def _answers(name: str) -> list[Finding]:
    """Run a script in two workers; return the answers. `test_state_comparison.py` has the correct scripts'."""

    def work(world: World) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        watching = record(world.rank, Limits(1000, 1000.0, epochs=1000), sent.append)
        getattr(checked_programs, name)()
        watching.finish()
        return sent

    records = dict(enumerate(run_in_workers(2, work)))
    assert not [record for own in records.values() for record in own if record.get("error")]
    return [*judge_replicas(records), *judge_samples(records)]


def _check(name: str, folder: Path, *flags: str) -> Done:
    return run([*LOCKSTEP, "check", *flags, "--", sys.executable, str(PROGRAMS), name], cwd=folder)


def _is_named(name: str, answers: list[dict[str, str]]) -> None:
    fault = FAULTS[name]
    found = {answer["question"]: answer for answer in answers if answer["verdict"] == fault.verdict}
    assert fault.question in found, answers
    answer = found[fault.question]
    assert fault.words in answer["detail"]
    assert answer["fix"]
    path, _, line = answer["where"].rpartition(":")
    assert Path(path).name == PROGRAMS.name
    assert fault.line in PROGRAMS.read_text().splitlines()[int(line) - 1]


def _own(names: Any) -> list[str]:
    return [name for name in names if not name.startswith(OTHER_LAUNCHES) and name != HANGS]


@pytest.mark.parametrize("name", sorted({FIRST[kind] for kind in FIRST} & {*_own(FAULTS)}))
def test_a_fault_of_each_kind_is_named(name: str) -> None:
    _is_named(name, [asdict(answer) for answer in _answers(name)])


def test_steps_after_one_that_raised_are_seen() -> None:
    assert {answer.question: answer.verdict for answer in _answers("ddp_step_that_raises")}[SAME_WEIGHTS] == "yes"


@pytest.mark.parametrize("name", ["hvd_optimizer", "short_loader_repeats"])  # whose epochs end on one worker first
def test_a_correct_script_ends_with_0(name: str, tmp_path: Path) -> None:
    done = _check(name, tmp_path, "--json")
    assert done.returncode == 0, done.stdout
    assert {answer["verdict"] for answer in json.loads(done.stdout)["answers"]} <= {"yes", "not seen"}


def test_a_script_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("import torch")
    done = run([*LOCKSTEP, "check", "--", sys.executable, "empty.py"], cwd=tmp_path)
    assert done.returncode == 2
    assert "no step of an optimizer of torch was seen" in done.stderr


def test_answers_from_a_part_of_the_steps_are_not_silent(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    done = run([*LOCKSTEP, "check", "--", sys.executable, "odd.py"], cwd=tmp_path)
    for rank in range(2):
        assert f"worker {rank} is recorded up to step 1 only: ZeroDivisionError" in done.stderr


def test_a_worker_that_takes_no_step_is_named(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    done = run([*LOCKSTEP, "check", "--", sys.executable, "alone.py"], cwd=tmp_path)
    assert done.returncode == 0
    assert "the weights stay equal after each step: not seen; worker 1 took no step of an optimizer" in done.stdout


def test_a_script_with_a_fault_that_fails_shows_why(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    done = run([*LOCKSTEP, "check", "--", sys.executable, "full.py"], cwd=tmp_path)
    assert done.returncode == 10
    assert "the workers begin with the same weights: no" in done.stdout
    assert "OSError: no space left on the device" in done.stderr


def test_workers_that_wait_for_each_other_are_ended(tmp_path: Path) -> None:
    (tmp_path / "lone.py").write_text(LONE_BARRIER)
    done = run([*LOCKSTEP, "check", "--minutes", f"{scaled(0.05)}", "--", sys.executable, "lone.py"], cwd=tmp_path)
    assert done.returncode == 8, done.stdout + done.stderr
    assert re.search(r"rank 0 in barrier #\d, at lone.py:7 ", done.stderr)
    assert "error: no step of an optimizer of torch was seen" in done.stderr


@pytest.mark.parametrize(("reduction", "code", "words"), [("mean", 0, "worker: yes; 16 steps"), ("sum", 10, "sum")])
def test_losses_are_compared_with_one_worker(reduction: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_BATCH)
    program = [sys.executable, "train.py", "{batch}", reduction]
    done = run([*LOCKSTEP, "check", "--invariance", "16", "--", *program], cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout[done.stdout.index(SAME_LOSSES) :]


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_named(name: str, tmp_path: Path) -> None:
    done = _check(name, tmp_path, "--json")
    assert done.returncode == (10 if FAULTS[name].verdict == "no" else 0)
    _is_named(name, json.loads(done.stdout)["answers"])


@pytest.mark.long
@pytest.mark.parametrize("name", CORRECT)
def test_every_correct_script_raises_no_alarm(name: str, tmp_path: Path) -> None:
    done = _check(name, tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
