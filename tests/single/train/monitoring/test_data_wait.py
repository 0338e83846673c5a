"""Waiting for data: when something is said, and what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lockstep.cli import main
from lockstep.config.schema import AugmentConfig, DataConfig, TrainConfig
from lockstep.data.sets import EncodedSplit, FileSplit, ImageData, InputSpec, MemorySplit, UserSplit
from lockstep.files.jsonl import read_records
from lockstep.train.monitoring import data_wait
from lockstep.train.monitoring.data_wait import DataWait, advise, choose_processes, network_of
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

SPEC = InputSpec(3, 224, 224, (0.0,) * 3, (1.0,) * 3)
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


class Packed(EncodedSplit):
    """Images in a pack, which are not read here."""

    def __len__(self) -> int:
        return 2

    def name(self, sample: int) -> str:
        raise NotImplementedError

    def read(self, sample: int) -> bytes:
        raise NotImplementedError


FILES = FileSplit([Path("/images/a.jpg")] * 2, [0, 0])
OWN = UserSplit([None] * 2)
MEMORY = MemorySplit(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
ROTATED = {"augment": AugmentConfig(rotate=5, zoom=0.1)}


@pytest.mark.parametrize(
    ("split", "processes", "device", "settings", "words"),
    [
        (FILES, 1, "cuda", {}, "raise -j from 1 to 4"),
        (OWN, 1, "cuda", {}, "raise -j from 1 to 4"),
        (FILES, 4, "cuda", {}, "the CPU is the bottleneck (4 cores per worker, all busy decoding): --in-memory always"),
        (FILES, 4, "cpu", {}, "shared with the model): --in-memory always --image-size 224 decodes once (0.0 GB, "),
        (FILES, 4, "cuda", {}, "a smaller --image-size than 224; smaller files (`lockstep data pack`); --decode gpu,"),
        (Packed(), 4, "cuda", {}, "smaller --image-size than 224; --decode gpu, if they are JPEG;"),
        (Packed(), 4, "cpu", {}, "smaller --image-size than 224; more cores for each worker"),
        (FILES, 4, "cuda", {"data": DataConfig(decode="gpu")}, "or leave out --decode gpu"),
        (OWN, 4, "cuda", {}, "loading a batch of your data set with 4 loader processes takes longer than a step"),
        (MEMORY, 0, "cuda", {}, "raise -b for fewer batches"),
        (MEMORY, 0, "cuda", ROTATED, "reduce --rotate, --zoom"),
    ],
)
def test_advice_fits_how_the_images_reach_the_worker(
    split: Any, processes: int, device: str, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_wait, "usable_cores", lambda: 4)
    monkeypatch.setattr(data_wait, "network_of", lambda path: "")
    world, data = World(RankInfo(), torch.device(device)), ImageData("set", ("a",), split, split, SPEC)
    assert words in advise(TrainConfig(**settings), world, data, processes)


def test_network_and_size_of_files_change_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_wait, "usable_cores", lambda: 1)
    world, data = World(RankInfo(), torch.device("cuda")), ImageData("set", ("a",), FILES, FILES, SPEC)
    monkeypatch.setattr(data_wait, "network_of", lambda path: "lustre")
    assert "the images are on lustre" in advise(TrainConfig(), world, data, 1)
    monkeypatch.setattr(data_wait, "network_of", lambda path: "")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert "(1 core per worker, all busy decoding): a smaller --image-size" in advise(TrainConfig(), world, data, 1)


def test_nothing_is_said_up_to_10_percent_and_each_advice_once() -> None:
    wait = DataWait(lambda: "the CPU is the bottleneck")
    assert wait.lines(1.0, 10.0) == []
    assert wait.lines(0.4, 0.6) == []  # nobody gains anything there
    (line,) = wait.lines(2.0, 10.0)
    assert line.startswith("waiting for data took 20 % of the epoch: the CPU is the bottleneck")
    assert wait.lines(3.0, 10.0) == []


def test_the_start_of_the_processes_is_counted_separately() -> None:
    wait = DataWait(lambda: "the CPU is the bottleneck")
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
