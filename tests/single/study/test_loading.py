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

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data.readers import Placement
from lockstep.data.sets import FileSplit, describe_custom
from lockstep.data.sources import digits, image_folder
from lockstep.errors import CorruptImageError
from lockstep.study.figures import Figure, Turn
from lockstep.study.loading import LoadingStudy, describe_stage, wait_share
from lockstep.study.stages import MemoryFiles, Setting, measure_demand, measure_pipeline, measure_stages, orders

SHORT = {"seconds": 0.02, "repeats": 2}
CPU = Placement(torch.device("cpu"))


def _figure(name: str, rate: int) -> Figure:
    return Figure(name, "", [Turn(1.0, rate)] * 3)


def _photographs(new_folder: Callable[..., Path], **config: Any) -> Setting:
    root = new_folder(sizes=((90, 70), (70, 90)), train=6)
    data = image_folder.load(root, DataConfig(dataset=str(root), image_size=32))
    return Setting(data, AugmentConfig(flip=True, rand_augment=1, mixup=0.2), 4, CPU, **{**SHORT, **config})


def test_orders_bring_each_sample_once_before_any_comes_again() -> None:
    batches = list(islice(orders(10, 4), 5))
    assert all(len(batch) == 4 for batch in batches)
    assert set(Counter(np.concatenate(batches).tolist()).values()) == {2}


def test_files_pass_all_stages_and_no_process_stays(new_folder: Callable[..., Path]) -> None:
    setting = _photographs(new_folder)
    before, threads = psutil.Process().children(recursive=True), torch.get_num_threads()
    stages = list(measure_stages(setting))
    assert [stage.name for stage in stages] == ["read", "decode", "augment"]
    assert all(stage.images_per_second.median > 0 for stage in stages)
    assert isinstance(setting.data.train, FileSplit)
    sizes = [path.stat().st_size for path in setting.data.train.paths]
    assert all(min(sizes) <= turn.size_bytes / turn.images <= max(sizes) for turn in stages[0].turns)
    assert stages[0].images_per_second.median > stages[1].images_per_second.median  # reading is not decoding
    pipeline = dict(measure_pipeline(setting, [0, 1]))
    assert [each.images_per_second.median > 0 for each in pipeline.values()] == [True, True]
    assert psutil.Process().children(recursive=True) == before
    assert torch.get_num_threads() == threads


def test_what_is_decoded_lies_in_memory_as_the_files_are(new_folder: Callable[..., Path]) -> None:
    split = _photographs(new_folder).data.train
    assert isinstance(split, FileSplit)
    held = MemoryFiles(split, np.array([3, 1]))
    assert [held.read(0), held.read(1)] == [split.paths[3].read_bytes(), split.paths[1].read_bytes()]
    assert (held.name(0), held.labels) == (str(split.paths[3]), [split.labels[3], split.labels[1]])


def test_images_in_memory_and_custom_sets_have_their_stages() -> None:
    memory = Setting(digits.load(), AugmentConfig(shift=1, rotate=5.0), 32, CPU, **SHORT)
    assert list(measure_stages(memory)) == []
    assert list(dict(measure_pipeline(memory, [0, 1, 2]))) == [0]
    own = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 2)
    users = Setting(describe_custom("own", own, own), AugmentConfig(), 4, CPU, **SHORT)
    assert [stage.name for stage in measure_stages(users)] == ["items", "augment"]


@pytest.mark.parametrize("skip", [False, True])
def test_corrupt_images_stop_it_unless_they_are_to_be_skipped(new_folder: Callable[..., Path], skip: bool) -> None:
    setting = _photographs(new_folder, skip_corrupt=skip, repeats=1, seconds=0.2)
    assert isinstance(setting.data.train, FileSplit)
    path = setting.data.train.paths[5]
    path.write_bytes(path.read_bytes()[:100])
    if skip:
        assert len(list(measure_stages(setting))) == 3
    else:
        with pytest.raises(CorruptImageError, match=path.name):
            list(measure_stages(setting))


def test_the_demand_is_that_of_training_steps() -> None:
    setting = Setting(digits.load(), AugmentConfig(), 8, CPU, **SHORT)
    figure = measure_demand(setting, "digits-net", "fp32")
    assert figure.about == "digits-net, fp32: forward, backward and step"
    assert figure.turns[0].images % 8 == 0


@pytest.mark.parametrize(
    ("processes", "rate", "share"), [(0, 300, 0.25), (1, 50, 0.5), (2, 100, 0.0), (4, 1000, 0.0), (0, 100, 0.5)]
)
def test_loader_processes_work_while_the_model_does(processes: int, rate: float, share: float) -> None:
    assert wait_share(processes, rate, 100) == pytest.approx(share)


STAGES = [_figure("read", 5000), _figure("decode", 200), _figure("augment", 9000)]


@pytest.mark.parametrize(
    ("pipeline", "demand", "last"),
    [
        ({0: 180, 1: 190, 2: 370}, None, "add -a ARCH"),
        ({0: 180, 1: 190, 2: 370}, 300, "the model needs 300 images/s: 2 loader processes per worker are enough"),
        ({0: 180, 1: 190, 2: 370}, 5, "the model needs 5 images/s: 0 loader processes per worker are enough"),
        ({0: 180, 1: 190, 2: 370}, 100, "1 loader process per worker is enough"),
        ({1: 190, 2: 370}, 740, "to speed up loading, use more cores per worker, a smaller --image-size"),
    ],
)
def test_the_verdict_names_the_slowest_stage_and_the_processes(
    pipeline: dict[int, int], demand: int | None, last: str
) -> None:
    figures = {number: _figure("pipeline", rate) for number, rate in pipeline.items()}
    study = LoadingStudy(STAGES, figures, _figure("demand", demand) if demand else None)
    lines = study.verdict()
    assert lines[:3] == ["read: 5,000 images/s ()", "decode: 200 images/s ()", "augment: 9,000 images/s ()"]
    assert study.limit == "decode"
    assert last in lines[-1]
    if demand == 740:
        assert lines[4] == (
            "the model needs 740 images/s, more than the pipeline delivers: with 2 loader processes, it would wait "
            "50 % of the time"
        )
        assert lines[5] == "if the rate keeps growing with processes, 4 loader processes per worker are enough"


def test_a_model_may_wait_although_the_pipeline_is_faster() -> None:
    lines = LoadingStudy([], {0: _figure("pipeline", 900)}, _figure("demand", 100)).verdict()
    assert lines[1] == "the model needs 100 images/s: with 0 loader processes, it would wait 10 % of the time"
    assert lines[2] == "to speed up loading, use less augmentation, a smaller --image-size, or a larger -b"


@pytest.mark.parametrize(("stored", "end"), [(250, ", 1 MB/s, 25 % from storage (x)"), (None, ", 1 MB/s (x)")])
def test_reading_reports_how_much_came_from_storage(stored: int | None, end: str) -> None:
    turns = [Turn(1.0, 10, 1_000_000, stored and stored * 1000)] * 2
    assert describe_stage(Figure("read", "x", turns)) == f"read: 10 images/s{end}"
