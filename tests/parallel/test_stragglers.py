"""A worker that slows the others down is named with its phase; the long form measures how reliably."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slow_program
import straggling
from commands import LOCKSTEP, own_environment, run
from worker_group import run_in_workers

from lockstep.diagnosis.stragglers import MIN_STEPS, REPORTS
from lockstep.files.jsonl import read_records

TRIALS = 100
PROGRAM = Path(__file__).parents[1] / "support/slow_program.py"
REPORT_SECONDS = 1.0
SLOW_SECONDS = 0.5  # in each step; half of it is more than all else in a step on a busy machine
Trial = Callable[[Path, int, bool], tuple[str, str]]


def test_a_slow_worker_is_named_with_its_phase(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    phase = "backward"  # within which DDP waits for the other worker
    job = phase, 1, SLOW_SECONDS, {"strategy": "ddp"}, time.sleep, 6
    records, _ = run_in_workers(2, straggling.train, tmp_path / "run", *job)
    assert [(record["ranks"], record["phase"]) for record in records if record["phase"] == phase] == [([1], phase)]
    (record,) = (record for record in records if record["phase"] == phase)
    assert record["seconds"] > SLOW_SECONDS > 2 * record["others_seconds"]
    assert "rank 1 slows all others down: " in capfd.readouterr().out
    steps = [each for each in read_records(tmp_path / "run" / "metrics.jsonl") if each["kind"] == "step"]
    assert all(each["phase_spread"][phase]["slowest"] == 1 for each in steps)
    (epoch,) = (each for each in read_records(tmp_path / "run" / "metrics.jsonl") if each.get("split") == "train")
    waiting, own = epoch["phase_seconds"]["reduction"], epoch["phase_seconds"][phase]
    assert own[1] > SLOW_SECONDS * steps[-1]["step"]
    assert own[1] > own[0]
    assert waiting[1] < waiting[0]
    for rank in range(2):
        assert sum(seconds[rank] for seconds in epoch["phase_seconds"].values()) < epoch["epoch_seconds"] + 1


def _trial(folder: Path, number: int, is_slow: bool) -> tuple[str, str]:
    """Return a description of a job and how its slow rank was named, if at all, wrongly or rightly."""
    chance = random.Random(number)
    size, rank = 2 + number % 3, chance.randrange(2 + number % 3)
    phase = chance.choice(straggling.PHASES) if is_slow else ""
    strategy, seconds = chance.choice(["ddp", "horovod"]), chance.uniform(0.02, 0.2)
    settings = {"strategy": strategy}
    records = run_in_workers(size, straggling.train, folder / str(number), phase, rank, seconds, settings)[0]
    named = [(record["ranks"], record["phase"]) for record in records]
    about = f"{size} workers, {strategy}, {1000 * seconds:.0f} ms in {phase or 'no phase'} of rank {rank}: {records}"
    return about, "right" if named == [([rank], phase)] else "nobody" if not named else "wrong"


def _program_trial(folder: Path, number: int, is_slow: bool) -> tuple[str, str]:
    """Return a description of a program's job and how its slow rank was named, if at all, wrongly or rightly."""
    chance = random.Random(number)
    size, rank = 2 + number % 3, chance.randrange(2 + number % 3)
    strategy, seconds = chance.choice(slow_program.STRATEGIES), chance.uniform(0.02, 0.2)
    phase = chance.choice(slow_program.PHASES) if is_slow else "none"
    steps = max(MIN_STEPS + 30, round((REPORTS + 2) * REPORT_SECONDS / seconds)) if is_slow else 1000
    arguments = map(str, (strategy, phase, rank, seconds, steps))
    records = folder / f"{is_slow}-{number}"
    command = [*LOCKSTEP, "run", "-np", str(size), "--observe-dir", records, "--", sys.executable, PROGRAM, *arguments]
    done = run(command, folder, own_environment(LOCKSTEP_STRAGGLER_SECONDS=str(REPORT_SECONDS)))
    assert done.returncode == 0, done.stderr
    found = [each for each in read_records(records / "metrics.jsonl") if each["kind"] == "straggler"]
    named = [(each["ranks"], each["phase"]) for each in found]
    about = f"{size} workers, {strategy}, {1000 * seconds:.0f} ms in {phase} of rank {rank}: {found}"
    return about, "right" if named == [([rank], phase)] else "nobody" if not named else "wrong"


TRIAL = pytest.mark.parametrize("trial", [_trial, _program_trial])


@pytest.mark.long
@pytest.mark.timeout(7200)
@TRIAL
def test_delays_are_attributed_to_the_right_rank_and_phase(tmp_path: Path, trial: Trial) -> None:
    outcomes = [trial(tmp_path, number, True) for number in range(TRIALS)]
    wrong = [about for about, outcome in outcomes if outcome != "right"]
    print(f"{TRIALS - len(wrong)} of {TRIALS} right", *wrong, sep="\n")
    assert len(wrong) <= TRIALS // 20


@pytest.mark.long
@pytest.mark.timeout(7200)
@TRIAL
def test_no_worker_is_named_without_a_delay(tmp_path: Path, trial: Trial) -> None:
    outcomes = [trial(tmp_path, number, False) for number in range(TRIALS)]
    assert [about for about, outcome in outcomes if outcome != "nobody"] == []
