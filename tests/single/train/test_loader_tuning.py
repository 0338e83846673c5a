"""The number of loader processes: by measuring where that pays, without a trace in the results."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.config import AugmentConfig, DataConfig, TrainConfig
from lockstep.data import folder as image_folder
from lockstep.data.loaders import reader_for
from lockstep.data.readers import Placement, Reader
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.users import describe
from lockstep.errors import CorruptImageError
from lockstep.place import Place
from lockstep.train import fit, loader_tuning
from lockstep.train.loader_tuning import (
    LoaderProcesses,
    candidates,
    choose_processes,
    is_flat,
    smallest_of_best,
    usual_processes,
)
from lockstep.world import World

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine's cores
ALONE = World(Place(), torch.device("cpu"))


class Slow:
    """64 items that take a while each; with a lock, only one process gets on at a time."""

    classes = ("a", "b")

    def __init__(self, seconds: float, lock: Path | None = None):
        self._seconds, self._lock = seconds, lock

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._lock is None:
            time.sleep(self._seconds)
        else:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(self._seconds)
        return torch.full((1, 4, 4), index / 64), index % 2


def _choose(data: ImageData, images: int = 10_000, **settings: Any) -> LoaderProcesses:
    config = TrainConfig(data=DataConfig(**settings))

    def make(processes: int) -> Reader:
        placement = Placement(ALONE.device)
        skip = config.data.skip_corrupt
        return reader_for(
            data.train, data.input, placement, AugmentConfig(), processes=processes, skip_corrupt=skip, sizes={}
        )

    return choose_processes(config, ALONE, data.train, images, 8, make)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_tuning, "usable_cores", lambda: 4)


@pytest.fixture
def long_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For rates that can be compared on a loaded machine."""
    monkeypatch.setattr(loader_tuning, "WINDOW_SECONDS", 2.0)
    monkeypatch.setattr(loader_tuning, "LIMIT_SECONDS", 60.0)


@pytest.mark.parametrize(
    ("cores", "device", "expected"),
    [(1, "cpu", [1, 0]), (1, "cuda", [1]), (2, "cpu", [1, 2]), (6, "cuda", [1, 2, 4, 6]), (8, "cpu", [1, 2, 4, 8])],
)
def test_powers_of_two_and_all_cores_are_tried(cores: int, device: str, expected: list[int]) -> None:
    assert candidates(cores, device) == expected


@pytest.mark.parametrize(
    ("rates", "number", "flat"),
    [
        ({1: 210.0}, 1, False),
        ({1: 210.0, 2: 405.0, 4: 610.0}, 4, False),
        ({1: 210.0, 2: 405.0, 4: 420.0}, 2, True),
        ({1: 210.0, 2: 150.0}, 1, True),
        ({1: 100.0, 0: 130.0}, 0, False),
        ({1: 100.0, 0: 100.0}, 0, True),
    ],
)
def test_the_smallest_number_within_5_percent_of_the_best_is_taken(
    rates: dict[int, float], number: int, flat: bool
) -> None:
    assert smallest_of_best(rates) == number
    assert is_flat(rates) is flat


@pytest.mark.usefixtures("four_cores", "long_windows")
def test_items_that_wait_get_all_processes_and_none_stays_behind() -> None:
    before = psutil.Process().children(recursive=True)
    chosen = _choose(describe("slow", Slow(0.01), Slow(0)))
    assert psutil.Process().children(recursive=True) == before
    assert (chosen.number, chosen.is_measured) == (4, True)
    (line,) = chosen.describe()
    assert line.startswith("4 loader processes a worker (measured: 1: ")
    rates = [float(part.split(": ")[-1].removesuffix(" images/s)")) for part in line.split(", ")]
    assert all(rate < 130 * processes for rate, processes in zip(rates, (1, 2, 4), strict=True))  # 100 each
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.usefixtures("four_cores", "long_windows")
def test_items_that_one_process_alone_can_make_at_a_time_get_one(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    for _ in range(3):  # 5 % more make a rate better, and a loaded machine may take as much from one window
        chosen = _choose(describe("locked", Slow(0.01, tmp_path / "lock"), Slow(0)))
        if chosen.number == 1:
            break
    assert chosen.number == 1
    assert "4:" not in chosen.reason  # which was not tried


@pytest.mark.usefixtures("four_cores")
def test_very_slow_items_get_the_usual_number_without_trying_all() -> None:
    chosen = _choose(describe("very slow", Slow(0.5), Slow(0)))
    assert chosen.number == 4
    assert not chosen.is_measured
    assert "too slow to try more" in chosen.reason


@pytest.mark.usefixtures("four_cores")
def test_what_need_not_be_measured_is_not() -> None:
    slow = describe("slow", Slow(0), Slow(0))
    assert _choose(slow, loader_workers=3) == LoaderProcesses(3)
    assert _choose(slow, images=100).describe() == [
        "4 loader processes a worker (by its cores; so short a run is not measured)"
    ]
    memory = MemorySplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert usual_processes(TrainConfig(), ALONE, memory).describe() == []


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("skip", [False, True])
def test_a_corrupt_image_is_met_as_in_training(
    new_folder: Callable[..., Path], skip: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_folder(sizes=((80, 70), (70, 80)), train=5)
    for path in root.glob("train/*/00[0-3].png"):
        path.write_bytes(path.read_bytes()[:100])
    data = image_folder.load(root, DataConfig(dataset=str(root), image_size=32))
    before = psutil.Process().children(recursive=True)
    if skip:
        with caplog.at_level(logging.WARNING, "lockstep"):
            assert _choose(data, skip_corrupt=True).is_measured
        assert "cannot be decoded" in caplog.text
    else:
        with pytest.raises(CorruptImageError, match="cannot be decoded"):
            _choose(data)
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.usefixtures("four_cores")
def test_measuring_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_tuning, "FEWEST_IMAGES", 1)
    train = partial(fit, train_set=Slow(0), val_set=Slow(0), epochs=1, batch_size=16, lr=0.1, track=())
    weights = []
    for name, processes in (("measured", "auto"), ("plain", 0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        train(model, run_dir=tmp_path / name, loader_workers=processes)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert "measured: 1:" in (tmp_path / "measured" / "logs" / "worker-0.log").read_text()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
