"""The number of loader processes: by measuring where that pays, without a trace in the results."""

from __future__ import annotations

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

from lockstep.config.schema import AugmentConfig, DataConfig, TrainConfig
from lockstep.data.loaders import reader_for
from lockstep.data.pipeline.readers import Placement, Reader
from lockstep.data.sets import ImageData, MemorySplit
from lockstep.data.sources import image_folder
from lockstep.data.sources.user_dataset import describe
from lockstep.errors import CorruptImageError
from lockstep.train import fit
from lockstep.train.monitoring import loader_tuning
from lockstep.train.monitoring.loader_tuning import (
    LoaderProcesses,
    candidates,
    choose_processes,
    is_flat,
    smallest_of_best,
    usual_processes,
)
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine's cores
ALONE = World(RankInfo(), torch.device("cpu"))


class Slow:
    """64 items that take a while each."""

    classes = ("a", "b")

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
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
def test_the_smallest_number_close_to_the_best_is_taken(rates: dict[int, float], number: int, flat: bool) -> None:
    assert smallest_of_best(rates) == number
    assert is_flat(rates) is flat


@pytest.mark.usefixtures("four_cores")
def test_waiting_items_are_measured_and_no_process_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_tuning, "LIMIT_SECONDS", 60.0)
    before = psutil.Process().children(recursive=True)
    chosen = _choose(describe("slow", Slow(0.01), Slow(0)))
    assert psutil.Process().children(recursive=True) == before
    assert chosen.is_measured
    (line,) = chosen.describe()
    figures = line.partition("(measured: ")[2].removesuffix(" images/s)").split(", ")
    rates = {int(processes): float(rate) for processes, rate in (each.split(": ") for each in figures)}
    assert rates.keys() >= {1, 2}
    assert all(rate < 130 * processes for processes, rate in rates.items())  # 100 each at most


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("rates", "number", "tried"),
    [({1: 100, 2: 200, 4: 400}, 4, "1: 100, 2: 200, 4: 400"), ({1: 100, 2: 104}, 1, "1: 100, 2: 104")],
    ids=["items that wait", "items that one process alone can make at a time"],
)
def test_the_rates_decide(monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], number: int, tried: str) -> None:
    monkeypatch.setattr(loader_tuning, "measure_rate", lambda reader, plan, processes, seconds: rates[processes])
    chosen = _choose(describe("slow", Slow(0), Slow(0)))
    assert chosen == LoaderProcesses(number, f"measured: {tried} images/s", is_measured=True)


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
        "4 loader processes per worker (from the number of cores; the run is too short to measure)"
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
