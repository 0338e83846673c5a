"""Waiting for data: when something is said, and what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli import main
from lockstep.config.schema import DataConfig, TrainConfig
from lockstep.data.sets import FileSplit, MemorySplit, UserSplit
from lockstep.files.jsonl import read_records
from lockstep.train.inputs import DataWait, advise, choose_processes
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

SLOW = """
import time, torch

class Slow:
    classes = ("a", "b")
    def __len__(self): return 16
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.full((1, 8, 8), index / 16), index % 2

def load(): return Slow(), Slow()
"""


FILES = FileSplit([Path("/images/a.jpg")] * 2, [0, 0])
OWN = UserSplit([None] * 2)
MEMORY = MemorySplit(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("split", "processes", "words"),
    [
        (FILES, 1, "raise -j from 1 to 4"),
        (OWN, 0, "raise -j from 0 to 4"),
        (FILES, 4, "`lockstep study loading` shows the bottleneck"),
        (MEMORY, 0, "`lockstep study loading` shows the bottleneck"),
    ],
)
def test_advice_names_unused_cores_or_how_to_find_the_bottleneck(split: Any, processes: int, words: str) -> None:
    assert advise(split, processes, cores=4).startswith(words)


def test_nothing_is_said_up_to_10_percent_and_advice_once() -> None:
    wait = DataWait("the CPU is the bottleneck")
    assert wait.lines(1.0, 10.0) == []
    assert wait.lines(0.4, 0.6) == []  # nobody gains anything there
    (line,) = wait.lines(2.0, 10.0)
    assert line.startswith("waiting for data took 20 % of the epoch: the CPU is the bottleneck")
    assert wait.lines(3.0, 10.0) == []


def test_the_start_of_the_processes_is_counted_separately() -> None:
    wait = DataWait("the CPU is the bottleneck")
    wait.first_batch(2.0)
    assert wait.lines(2.1, 10.0) == ["waiting for data took 2.1 s, 2.0 s of it for the session's first batch"]
    wait.first_batch(2.0)  # of the next epoch
    assert "20 %" in wait.lines(2.0, 10.0)[0]


def test_a_slow_data_set_gets_one_line_of_advice_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_set.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["train", "--data", "slow_set:load", "-a", "digits-net", "-b", "4", "-j", "0", "--epochs", "3", "--track"]
    assert main([*words, "--run-dir", "run", "--log-every", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = [line for line in lines if "train" in line and "  wait " in line]
    assert len(shares) == 3
    (advice,) = [line for line in lines if line.startswith("waiting for data took")]
    assert "raise -j from 0 to" in advice
    assert lines.index(shares[0]) + 1 == lines.index(advice)
    assert advice in Path("run/logs/worker-0.log").read_text()
    waits = [record["data_wait"] for record in read_records(Path("run/metrics.jsonl")) if "data_wait" in record]
    assert min(waits) > 0.1


@pytest.mark.parametrize(("cores", "setting", "number"), [(4, "auto", 4), (64, "auto", 8), (4, 3, 3), (4, 0, 0)])
def test_each_core_has_a_loader_process_up_to_eight(cores: int, setting: Any, number: int) -> None:
    config, alone = TrainConfig(data=DataConfig(loader_workers=setting)), World(RankInfo(), torch.device("cpu"))
    assert choose_processes(config, alone, UserSplit([]), cores) == number
    memory = MemorySplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert choose_processes(config, alone, memory, cores) == 0
