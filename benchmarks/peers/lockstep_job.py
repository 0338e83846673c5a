"""The Lockstep contestant: an epoch of the real training loop, with its loader, metrics, records and TensorBoard.

python lockstep_job.py CASE FOLDER lockstep [--contiguous], under `lockstep run`

Images and weights are in channels_last, as in Lockstep's recipes for such data, unless --contiguous is given.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch
from cases import DEVIATIONS, LR, MEANS, MOMENTUM, WEIGHT_DECAY, Case, asked
from turns import take_turns

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data.loaders import TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import FileSplit, ImageData, InputSpec, MemorySplit
from lockstep.data.sharding import Sharding
from lockstep.data.sources import image_folder, torchvision_sets

CPU = torch.device("cpu")


def data_of(case: Case, folder: Path, workers: int) -> ImageData:
    """Return a data set with the images of one epoch."""
    count = case.batch * case.steps * workers
    if case.images == "mnist":
        data = torchvision_sets.load("mnist", folder, download=False)
    elif case.images == "cifar10":
        content = np.load(folder / "cifar10.npz")
        images = torch.from_numpy(content["images"]).permute(0, 3, 1, 2).contiguous()
        split = MemorySplit(images, torch.from_numpy(content["labels"]))
        spec = InputSpec(3, 32, 32, MEANS["cifar10"], DEVIATIONS["cifar10"])
        data = ImageData("cifar10", tuple("0123456789"), split, split, spec)
    else:
        data = image_folder.load(folder / "photographs", DataConfig(dataset=str(folder / "photographs")))
    return dataclasses.replace(data, train=_first(data.train, count))


def _first(split: object, count: int) -> MemorySplit | FileSplit:
    if isinstance(split, MemorySplit):
        return MemorySplit(split.images[:count], split.labels[:count])
    assert isinstance(split, FileSplit)
    samples = [sample % len(split) for sample in range(count)]
    return FileSplit([split.paths[sample] for sample in samples], [split.labels[sample] for sample in samples])


def augmentation(case: Case) -> AugmentConfig:
    if not case.crop_and_flip:
        return AugmentConfig()
    return AugmentConfig(flip=True) if case.side >= 224 else AugmentConfig(shift=4, flip=True)


def loader_of(case: Case, data: ImageData, rank: int, workers: int) -> TrainLoader:
    """Return Lockstep's loader for a peer's loop."""
    processes = 0 if isinstance(data.train, MemorySplit) else 1
    reader = reader_for(data.train, data.input, Placement(CPU), augmentation(case), processes=processes)
    sharding = Sharding(len(data.train), case.batch * workers, rank, workers, drop_last=True)
    return TrainLoader(reader, sharding, CPU)


def main() -> None:
    from lockstep.train.fit import configure
    from lockstep.train.loop import train_epoch
    from lockstep.train.setup import build_job
    from lockstep.world.host_memory import keep_freed_memory
    from lockstep.world.launcher_environment import RankInfo
    from lockstep.world.world import connect

    task = asked()
    case = task.case
    rules = {"lr": LR, "momentum": MOMENTUM, "nesterov": False, "weight_decay": WEIGHT_DECAY, "decay_all": True}
    augment = augmentation(case)
    connection = connect(RankInfo.from_environment(), "cpu")
    keep_freed_memory(CPU)  # as `lockstep train` does
    with connection as world, tempfile.TemporaryDirectory() as runs:
        data = data_of(case, task.folder, world.size)
        run_dir = world.from_main(runs)
        config = configure(
            **rules,
            lr_scaling="none",
            batch_size=case.batch,
            epochs=1000,
            schedule="constant",
            device="cpu",
            channels_last=not task.is_contiguous,
            loader_workers="auto" if isinstance(data.train, MemorySplit) else 1,
            run_dir=f"{run_dir}/run",
            shift=augment.shift,
            flip=augment.flip,
        )
        job = build_job(config, world, data, task.model())

        def epoch() -> int:
            train_epoch(job)
            return case.batch * case.steps

        take_turns(epoch)


if __name__ == "__main__":
    main()
