"""The loading study: its rates, its verdict, and that it leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.config.schema import AugmentConfig, DataConfig, ModelConfig, TrainConfig
from lockstep.data.sets import ImageData, describe_custom
from lockstep.data.sources import digits, image_folder
from lockstep.errors import CorruptImageError
from lockstep.study.loading import (
    Figure,
    LoadingStudy,
    Setting,
    Spread,
    candidates,
    measure_demand,
    measure_pipeline,
    measure_stages,
    orders,
)
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


def _figure(name: str, rate: int) -> Figure:
    return Figure(name, "", Spread(rate, rate, rate))


def _setting(data: ImageData, batch: int, augment: AugmentConfig | None = None, **config: Any) -> Setting:
    job = TrainConfig(DataConfig(**config), augment or AugmentConfig(), ModelConfig("digits-net"))
    return Setting(job, data, World(RankInfo(), torch.device("cpu")), batch, seconds=0.02)


def _photographs(new_folder: Callable[..., Path], **config: Any) -> Setting:
    root = new_folder(sizes=((90, 70), (70, 90)), train=6)
    data = image_folder.load(root, DataConfig(dataset=str(root), image_size=32))
    return _setting(data, 4, AugmentConfig(flip=True, rand_augment=1, mixup=0.2), **config)


def test_orders_bring_each_sample_once_before_any_comes_again() -> None:
    batches = list(islice(orders(np.arange(10), 4), 5))
    assert all(len(batch) == 4 for batch in batches)
    assert set(Counter(np.concatenate(batches).tolist()).values()) == {2}


def test_files_pass_all_stages_and_no_process_stays(new_folder: Callable[..., Path]) -> None:
    setting = _photographs(new_folder)
    before, threads = psutil.Process().children(recursive=True), torch.get_num_threads()
    stages = list(measure_stages(setting))
    assert [stage.name for stage in stages] == ["read", "decode", "augment"]
    assert all(stage.images_per_second.median > 0 for stage in stages)
    assert stages[0].images_per_second.median > stages[1].images_per_second.median  # reading is not decoding
    pipeline = dict(measure_pipeline(setting, [0, 1]))
    assert [each.images_per_second.median > 0 for each in pipeline.values()] == [True, True]
    assert psutil.Process().children(recursive=True) == before
    assert torch.get_num_threads() == threads


def test_images_in_memory_and_custom_sets_have_their_stages() -> None:
    memory = _setting(digits.load(), 32, AugmentConfig(shift=1, rotate=5.0))
    assert list(measure_stages(memory)) == []
    assert list(dict(measure_pipeline(memory, [0, 1, 2]))) == [0]
    own = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)
    users = _setting(describe_custom("own", own, own), 4)
    assert [stage.name for stage in measure_stages(users)] == ["items", "augment"]


@pytest.mark.parametrize("skip", [False, True])
def test_corrupt_images_stop_it_unless_they_are_to_be_skipped(new_folder: Callable[..., Path], skip: bool) -> None:
    setting = _photographs(new_folder, skip_corrupt=skip)
    path = setting.data.train.paths[5]
    path.write_bytes(path.read_bytes()[:100])
    if skip:
        assert len(list(measure_stages(setting))) == 3
    else:
        with pytest.raises(CorruptImageError, match=path.name):
            list(measure_stages(setting))


def test_the_demand_is_that_of_training_steps() -> None:
    figure = measure_demand(_setting(digits.load(), 8))
    assert figure.about == "digits-net, fp32: forward, backward and step"
    assert figure.images_per_second.median > 0


@pytest.mark.parametrize(("cores", "numbers"), [(1, [0, 1]), (4, [0, 1, 2, 4]), (6, [0, 1, 2, 4, 6])])
def test_numbers_of_processes_end_with_the_cores(cores: int, numbers: list[int]) -> None:
    assert candidates(cores) == numbers


@pytest.mark.parametrize(
    ("pipeline", "demand", "verdict"),
    [
        ({0: 180, 1: 190, 2: 370}, 300, ["300 images/s: with 2 loader processes per worker, it waits 0 %"]),
        ({0: 180, 1: 190, 2: 370}, 5, ["5 images/s: with 0 loader processes per worker, it waits 3 %"]),
        ({0: 180, 1: 190, 2: 370}, 100, ["100 images/s: with 1 loader process per worker, it waits 0 %"]),
        (
            {1: 190, 2: 370},
            740,
            [
                "740 images/s: with 2 loader processes per worker, it waits 50 %",
                "to speed up loading, use more cores per worker, a smaller --image-size",
            ],
        ),
    ],
)
def test_the_verdict_names_the_slowest_stage_and_the_processes(
    pipeline: dict[int, int], demand: int, verdict: list[str]
) -> None:
    figures = {number: _figure("pipeline", rate) for number, rate in pipeline.items()}
    stages = [_figure("read", 5000), _figure("decode", 200), _figure("augment", 9000)]
    study = LoadingStudy(stages, figures, _figure("demand", demand))
    lines = study.verdict()
    assert lines[:3] == ["read: 5,000 images/s ()", "decode: 200 images/s ()", "augment: 9,000 images/s ()"]
    assert study.limit == "decode"
    assert len(lines) == 3 + len(verdict)
    assert all(part in line for part, line in zip(verdict, lines[3:], strict=True))


def test_a_model_may_wait_although_the_pipeline_is_faster() -> None:
    lines = LoadingStudy([], {0: _figure("pipeline", 900)}, _figure("demand", 100)).verdict()
    assert lines[0] == ("the model needs 100 images/s: with 0 loader processes per worker, it waits 10 % of the time")
    assert lines[1] == "to speed up loading, use less augmentation, a smaller --image-size, or a larger -b"
