"""-j auto over several workers: one number, by the slowest."""

from __future__ import annotations

from pathlib import Path

import torch
from worker_group import run_in_workers

from lockstep.config.schema import AugmentConfig, TrainConfig
from lockstep.data.loaders import reader_for
from lockstep.data.pipeline.readers import Placement
from lockstep.data.sources.user_dataset import describe
from lockstep.train.monitoring import loader_tuning
from lockstep.train.monitoring.loader_tuning import choose_processes
from lockstep.world.world import World


class Quick:
    classes = ("a", "b")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1, 4, 4), index % 2


def _choose(world: World, folder: Path) -> None:
    loader_tuning.usable_cores = lambda: 4  # two for each worker
    rate = (50.0, 20.0)[world.rank]
    loader_tuning.measure_rate = lambda reader, plan, processes, seconds: rate * processes
    data = describe("quick", Quick(), Quick())
    placement = Placement(world.device)
    chosen = choose_processes(
        TrainConfig(),
        world,
        data.train,
        10_000,
        8,
        lambda processes: reader_for(data.train, data.input, placement, AugmentConfig(), processes=processes),
    )
    (folder / str(world.rank)).write_text(chosen.describe()[0])


def test_workers_agree_on_the_number_that_the_slowest_needs(tmp_path: Path) -> None:
    run_in_workers(2, _choose, tmp_path)
    lines = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    assert lines[0] == lines[1]
    assert lines[0] == "2 loader processes per worker (measured over 2 workers: 1: 40, 2: 80 images/s)"
