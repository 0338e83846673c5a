"""Waiting for data: when something is said, and what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lockstep.cli import main
from lockstep.config.schema import AugmentConfig, DataConfig, TrainConfig
from lockstep.data.sets import MemorySplit, UserSplit
from lockstep.files.jsonl import read_records
from lockstep.train.monitoring import data_wait
from lockstep.train.monitoring.data_wait import DataWait, LoadingFacts, advise, choose_processes, network_of
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

FILES = LoadingFacts("files", 4, 4, "cuda", 224, AugmentConfig(), decoded_bytes=2, room_bytes=1)
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"processes": 1}, "raise -j from 1 to 4"),
        ({"processes": 1, "kind": "user", "network": "nfs"}, "raise -j from 1 to 4"),
        ({"network": "lustre"}, "the images are on lustre"),
        (
            {},
            "the CPU is the bottleneck (4 cores per worker, all busy decoding): a smaller --image-size",
        ),
        ({"device": "cpu"}, "shared with the model"),
        ({"decoded_bytes": 10**9, "room_bytes": 10**9}, "--in-memory always --image-size 224 decodes once (1.0 GB"),
        ({"kind": "packed"}, "smaller --image-size than 224; --decode gpu, if they are JPEG;"),
        ({"kind": "packed", "device": "cpu"}, "smaller --image-size than 224; more cores for each worker"),
        ({"decode": "gpu"}, "or leave out --decode gpu"),
        ({"cores": 1, "processes": 1}, "the CPU is the bottleneck (1 core per worker"),
        ({"kind": "user"}, "loading a batch of your data set with 4 loader processes takes longer than a step"),
        ({"kind": "memory"}, "raise -b for fewer batches"),
        (
            {"kind": "memory", "augment": AugmentConfig(rotate=5, zoom=0.1)},
            "reduce --rotate, --zoom",
        ),
    ],
)
def test_advice_fits_how_the_images_reach_the_worker(changes: dict[str, object], words: str) -> None:
    assert words in advise(replace(FILES, **changes))  # type: ignore[arg-type]


def test_nothing_is_said_up_to_10_percent_and_each_advice_once() -> None:
    wait = DataWait(FILES)
    assert wait.lines(1.0, 10.0) == []
    assert wait.lines(0.4, 0.6) == []  # nobody gains anything there
    (line,) = wait.lines(2.0, 10.0)
    assert line.startswith("waiting for data took 20 % of the epoch: the CPU is the bottleneck")
    assert wait.lines(3.0, 10.0) == []


def test_the_start_of_the_processes_is_counted_separately() -> None:
    wait = DataWait(FILES)
    wait.first_batch(2.0)
    assert wait.lines(2.1, 10.0) == ["waiting for data took 2.1 s, 2.0 s of it for the session's first batch"]
    wait.first_batch(2.0)  # of the next epoch
    assert "20 %" in wait.lines(2.0, 10.0)[0]


@pytest.mark.parametrize(
    ("path", "expected"), [("/home/me/images/a.jpg", "nfs4"), ("/home", ""), ("/scratch/x", "lustre"), ("/", "")]
)
def test_the_longest_mount_point_decides_the_file_system(
    path: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = {"/": "ext4", "/home/me": "nfs4", "/scratch": "lustre"}
    partitions = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    assert network_of(Path(path)) == expected


def test_a_link_to_itself_lies_where_its_folder_does(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert network_of(tmp_path / "loop") == network_of(tmp_path)


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
def test_each_core_has_a_loader_process_up_to_eight(
    cores: int, setting: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_wait, "usable_cores", lambda: cores)
    config, alone = TrainConfig(data=DataConfig(loader_workers=setting)), World(RankInfo(), torch.device("cpu"))
    assert choose_processes(config, alone, UserSplit([])) == number
    memory = MemorySplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert choose_processes(config, alone, memory) == 0
